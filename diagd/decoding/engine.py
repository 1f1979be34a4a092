"""The loop: a stream of frames, written by the strategy asked for, each handed out when whole."""

import weakref
from collections.abc import Generator
from inspect import GEN_CLOSED, getgeneratorstate

from torch import Tensor

from diagd.decoding.inputs import check_actions, check_grid, check_room
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import DiagonalSchedule
from diagd.decoding.strategies.decode import decode
from diagd.decoding.strategies.strategy import Conditions, Strategy
from diagd.decoding.strategies.table import as_strategy
from diagd.decoding.stream import Stream


class DecodingEngine(Stream):
    """A stream of frames from a raster-order model, read by `prefill` and written by `decode`.

    Args:
        model: what to decode with (see `CausalModel`).
        height, width: tokens of a frame.
        num_action_tokens: conditioning tokens before each generated frame, 0 or more.
        batch_size: videos decoded side by side.
        max_slots: longest sequence to hold, in tokens, at most the model's context (the default).
        keep_frames: frames that are read again when the context is full; default as in `Stream`.
        sampling: how tokens are drawn; greedy by default.
        seed: of the draws, 64 bits: one number (batch row b uses seed + b) or one for each row.
        runner: how steps are executed: `eager`, `compile`, `cuda-graph` or `compiled-graph`.
        context: (1 or B, M, size) cross-attention input for models that have one.
        around_step: wraps the function that runs a step, for those who time or count steps.

    Raises:
        ValueError: arguments that do not fit the model or each other.
    """

    # weak, for it holds the engine: in a circle, a dropped engine would keep its cache for a while
    _under_way: "weakref.ref[Generator[Tensor, None, None]] | None" = None

    def set_sampling(self, sampling: SamplingOptions) -> None:
        """Draw otherwise from the next call of `decode` on; what was compiled is made anew.

        Raises:
            ValueError: a range that does not fit the model, or a generator of `decode` under way.
        """
        under_way = self._under_way and self._under_way()
        if under_way is not None and getgeneratorstate(under_way) != GEN_CLOSED:
            raise ValueError("sampling cannot change under way: close decode's generator first")
        super().set_sampling(sampling)

    def decode(
        self,
        strategy: Strategy | DiagonalSchedule | str,
        actions: Tensor | None = None,
        num_frames: int | None = None,
    ) -> Generator[Tensor, None, None]:
        """Generate frames, each yielded as soon as its last token is final.

        The stream is advanced frame by frame: closing the generator early keeps the frames yielded
        so far and forgets the one under way; the next call of `decode` closes it, too. Where not
        all frames fit the context, the strategy runs over as many at a time as do; over one at a
        time in a context that is full, so frames do not overlap there.

        Args:
            strategy: how to decode, by name (see `diagd.decoding.strategies.table`) or as a value.
                A schedule says how many frames, too.
            actions: (B, T, num_action_tokens) int64; actions[:, t] stands before frame t. None
                where there are none.
            num_frames: frames to generate; default as many as the schedule or the actions have.

        Returns:
            A generator of (B, height, width) int64.

        Raises:
            ValueError: a strategy, actions or a context that do not fit, or nothing prefilled.
        """
        if not self.window:
            raise ValueError("there is nothing to go on from: prefill comes before decode")
        if isinstance(strategy, DiagonalSchedule):
            check_grid(strategy.grid, self.frame.grid)
            num_frames = strategy.grid.num_frames
        elif num_frames is None:
            if actions is None or actions.ndim < 2:
                raise ValueError("num_frames is needed where there are no actions to count")
            num_frames = actions.shape[1]
        strategy = as_strategy(strategy)
        temperature, grid = self.sampling.temperature, self.frame.grid
        strategy.check(Conditions(temperature, grid, self.batch_size, self.pad))
        layout = self.layout(num_frames, 0, self.num_used > 0)
        check_actions(actions, layout, self.batch_size, self.model.num_embeddings)
        if actions is None:
            actions = self.tokens.new_empty(self.batch_size, num_frames, 0)
        if not self.is_endless and self.num_used + layout.num_slots > self.max_slots:
            check_room(self.layout(1, self.keep_frames), self.num_prefix, self.max_slots)
        under_way = self._under_way and self._under_way()
        if under_way is not None:
            under_way.close()
        self.verified = []
        frames = self._decode(strategy, actions.to(self.tokens.device))
        self._under_way = weakref.ref(frames)
        return frames

    def _decode(self, strategy: Strategy, actions: Tensor) -> Generator[Tensor, None, None]:
        done, num_frames = 0, actions.shape[1]
        while done < num_frames:
            fitting = self.room() or int(self.is_endless)
            if not fitting:
                self.drop_oldest()
                continue
            part = actions[:, done : done + fitting]
            held = min(self.num_held, 2)  # stand-ins reach 2 frames back
            layout = self.layout(part.shape[1], held, self.num_used > 0)
            self.open(layout, part)
            for _ in decode(strategy, self, layout):
                yield self.finish_frame(self.num_used + layout.slots_per_frame)
            done += part.shape[1]
