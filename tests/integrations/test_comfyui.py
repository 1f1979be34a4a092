"""The nodes are driven as ComfyUI does: by `INPUT_TYPES`, `FUNCTION`, and the workflow's links."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import diagd
from diagd.families.checkpoints import write_defaults
from diagd.families.cosmos import CosmosTokenizer
from diagd.families.defaults import GenerationDefaults, image_defaults
from tests.families.cosmos.scripts import write_scripts
from tests.worlds import (
    HEIGHT_PX,
    WIDTH_PX,
    model_config,
    random_model,
    smooth_frames,
    write_scenes,
    write_world,
)

FOLDER = Path(__file__).parents[2] / "integrations/comfyui"
WIDGETS = {"STRING": str, "INT": int, "FLOAT": float}


class ProgressBar:
    """ComfyUI's, whose calls are kept."""

    def __init__(self, total):
        bars.append(self)
        self.total, self.shown = total, []

    def update_absolute(self, value, total=None, preview=None):
        assert total == self.total
        self.shown.append((value, preview))


bars = list[ProgressBar]()


def load_nodes():
    """Import the folder by its path, as ComfyUI imports what is in custom_nodes."""
    place = FOLDER / "__init__.py"
    spec = importlib.util.spec_from_file_location("custom_nodes_diagd", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def nodes(monkeypatch):
    utils: Any = ModuleType("comfy.utils")
    utils.ProgressBar = ProgressBar
    monkeypatch.setitem(sys.modules, "comfy", ModuleType("comfy"))
    monkeypatch.setitem(sys.modules, "comfy.utils", utils)
    bars.clear()
    return load_nodes().NODE_CLASS_MAPPINGS


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Return the folder of a model that makes guided images of 3 x 5 tokens of its classes."""
    folder = write_world(tmp_path_factory.mktemp("images"))
    write_defaults(folder, image_defaults(guidance=2.0, top_p=0.95))
    return str(folder)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return str(write_scenes(write_world(tmp_path_factory.mktemp("world"))))


def run(kind, **inputs):
    """Run a node with the defaults of the inputs that are not given; returns its outputs."""
    declared = kind.INPUT_TYPES()
    assert not set(inputs) - {*declared["required"], *declared.get("optional", {})}
    for name, (type_, *options) in declared["required"].items():
        first = type_[0] if isinstance(type_, list) else (options or [{}])[0].get("default")
        inputs.setdefault(name, first)
    outputs = getattr(kind(), kind.FUNCTION)(**inputs)
    assert isinstance(outputs, tuple)
    assert len(outputs) == len(kind.RETURN_TYPES)
    for type_, output in zip(kind.RETURN_TYPES, outputs, strict=True):
        if type_ == "IMAGE":
            assert (output.dtype, output.shape[1:]) == (torch.float32, (HEIGHT_PX, WIDTH_PX, 3))
            assert 0 <= output.min() < output.max() <= 1
    return outputs


def pixels(image):
    return (image * 255).round().to(torch.uint8)


def off_by(frames, expected):
    """Return by how much: the painter rounds a batch otherwise than single frames, by 1 of 255."""
    assert frames.shape == expected.shape
    return (frames.int() - expected.int()).abs().max()


@pytest.mark.parametrize(("strategy", "k", "name"), [("diagonal", 2, "k=2"), ("exact", 1, "exact")])
def test_images_are_those_of_the_generator(nodes, images, strategy, k, name):
    (model,) = run(nodes["DiagdLoadModel"], model=images, dtype="float32")
    settings = {"text": "left", "count": 2, "strategy": strategy, "k": k, "seed": 5}
    (made,) = run(nodes["DiagdGenerateImages"], model=model, guidance=3.0, **settings)
    alone = diagd.VideoGenerator.from_pretrained(images, dtype="float32")
    expected = [
        alone.generate(None, ["left"], 1, strategy=name, seed=seed, guidance=3.0).frames[0]
        for seed in (5, 6)
    ]
    assert pixels(made).equal(torch.stack(expected))


@pytest.mark.parametrize("strategy", ["diagonal", "raster", "exact"])
def test_an_image_is_shown_while_it_comes_and_grey_where_it_is_not_written(nodes, images, strategy):
    (model,) = run(nodes["DiagdLoadModel"], model=images, dtype="float32")
    settings = {"text": "left", "count": 2, "strategy": strategy, "seed": 5}
    (made,) = run(nodes["DiagdGenerateImages"], model=model, previews=3, **settings)
    (bar,) = bars
    *previews, whole = [torch.tensor(np.array(shown[1])) for _, shown in bar.shown if shown]
    assert 1 < len(previews) <= 3
    assert whole.equal(pixels(made[0]))
    grey = [int((preview == 128).all(-1).sum()) for preview in previews]
    side = model.tokenizer.compression
    assert grey == sorted(grey, reverse=True)
    assert grey[0] >= side**2
    written = (previews[0][::side, ::side] != 128).any(-1)
    assert written[0, 0]
    assert not written[-1, -1]
    run(nodes["DiagdGenerateImages"], model=model, previews=0, **settings)
    assert [bool(shown) for _, shown in bars[-1].shown] == [False] * (len(bars[-1].shown) - 1) + [
        True
    ]


@pytest.mark.parametrize("context", [0, 2])
def test_a_clip_is_continued_as_by_the_generator_and_shown_while_it_comes(nodes, world, context):
    (model,) = run(nodes["DiagdLoadModel"], model=world, dtype="float32")
    clip = smooth_frames(3, HEIGHT_PX, WIDTH_PX)
    given = {"frames": clip.float() / 255, "actions": "forward*2,left", "num_frames": 4}
    frames, fps = run(nodes["DiagdContinueClip"], model=model, context_frames=context, **given)
    seen = clip[-(context or model.defaults.context_frames) :]
    expected = model.generate(seen, ["forward", "forward", "left", "left"], seed=0)
    assert off_by(pixels(frames), expected.frames) <= 1
    assert fps == expected.fps
    (bar,) = bars
    values = [value for value, _ in bar.shown]
    assert values == sorted(values)
    assert set(values) == set(range(1, bar.total + 1))
    previews = [np.array(shown[1]) for _, shown in bar.shown if shown]
    assert np.array_equal(np.stack(previews), pixels(frames))


def test_a_clip_may_begin_where_the_world_does_and_idle(nodes, world):
    (model,) = run(nodes["DiagdLoadModel"], model=world, dtype="float32")
    frames, _ = run(nodes["DiagdContinueClip"], model=model, num_frames=2, seed=3)
    opening = Path(world) / "prompt.mp4"
    expected = model.generate(opening, ["none"] * 2, seed=3).frames
    assert off_by(pixels(frames), expected) <= 1


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_frames_that_a_tokenizer_joins_are_painted_behind_the_clip(nodes, tmp_path):
    config = replace(model_config(0, 2, 3), vocab_size=64000, image_vocab_size=64000)
    tokenizer = CosmosTokenizer.from_jit(write_scripts(tmp_path))
    defaults = GenerationDefaults(context_frames=9, num_frames=8)
    model = diagd.VideoGenerator(random_model(config), config, tokenizer, None, defaults)
    clip = smooth_frames(9, 32, 48)
    given = {"num_frames": 8, "context_frames": 0, "strategy": "diagonal", "k": 1, "seed": 3}
    continued = nodes["DiagdContinueClip"]().generate(model, "", frames=clip / 255, **given)
    assert pixels(continued[0]).equal(model.generate(clip, num_frames=8, seed=3).frames)


def test_a_bar_that_interrupts_ends_a_node_and_the_model_goes_on(nodes, images, monkeypatch):
    (model,) = run(nodes["DiagdLoadModel"], model=images)
    with monkeypatch.context() as patched:
        patched.setattr(ProgressBar, "update_absolute", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(nodes["DiagdGenerateImages"], model=model, text="left")
    run(nodes["DiagdGenerateImages"], model=model, text="left")
    steps = range(1, bars[-1].total + 1)
    assert [value for value, _ in bars[-1].shown] == [*steps, steps[-1]]


def test_what_does_not_fit_is_refused_in_a_line(nodes, images, world):
    (image_model,) = run(nodes["DiagdLoadModel"], model=images)
    (video_model,) = run(nodes["DiagdLoadModel"], model=world)
    image, clip = nodes["DiagdGenerateImages"], nodes["DiagdContinueClip"]
    for kind, model, settings, message in (
        (image, video_model, {"text": "left"}, "this model makes videos: use Continue a clip"),
        (image, image_model, {"text": "a fox"}, "unknown action 'a fox', expected one of: none"),
        (image, image_model, {"text": "left", "k": 9}, r"row_lag must be in \[1, width=5\], got 9"),
        (clip, image_model, {}, "connect frames: this model has no start scene of its own"),
        (clip, video_model, {"num_frames": 1, "actions": "left*2"}, "expected 1 actions"),
    ):
        with pytest.raises(ValueError, match=message):
            run(kind, model=model, **settings)


def test_nodes_run_without_comfyui_and_have_names():
    module = load_nodes()
    assert module.ProgressBar is None
    assert module.NODE_DISPLAY_NAME_MAPPINGS.keys() == module.NODE_CLASS_MAPPINGS.keys()
    assert all(kind.CATEGORY == "diagd" for kind in module.NODE_CLASS_MAPPINGS.values())


def test_the_workflow_fits_the_nodes_and_runs(nodes):
    workflow = json.loads((FOLDER / "workflow.json").read_text(encoding="utf-8"))
    made: dict[int, Any] = {}  # by the number of a link
    assert [node["order"] for node in workflow["nodes"]] == list(range(len(workflow["nodes"])))
    for node in workflow["nodes"]:
        for slot, output in enumerate(node["outputs"]):
            for link in output["links"]:
                ends = next(one for one in workflow["links"] if one[0] == link)
                target = next(one for one in workflow["nodes"] if one["id"] == ends[3])
                assert ends[1:3] == [node["id"], slot]
                assert target["inputs"][ends[4]]["link"] == link
                assert target["inputs"][ends[4]]["type"] == output["type"] == ends[5]
        linked: dict[str, Any] = {one["name"]: made.get(one["link"]) for one in node["inputs"]}
        if (kind := nodes.get(node["type"])) is None:
            assert node["type"] == "SaveAnimatedWEBP"  # of ComfyUI itself
            assert linked["images"].shape == (16, 112, 192, 3)
            continue
        declared = kind.INPUT_TYPES()
        every = declared["required"] | declared.get("optional", {})
        types = {name: type_ for name, (type_, *_) in every.items()}
        values, given = iter(node["widgets_values"]), dict[str, Any]()
        for name, (type_, *options) in declared["required"].items():
            if name in linked:
                continue
            given[name] = next(values)
            if isinstance(type_, list):
                assert given[name] in type_
            else:
                assert isinstance(given[name], WIDGETS[type_]), name
            if options and options[0].get("control_after_generate"):
                assert next(values) in ("fixed", "increment", "decrement", "randomize")
        assert not list(values)
        assert linked.keys() <= types.keys()
        assert all(types[one["name"]] == one["type"] for one in node["inputs"])
        assert tuple(one["type"] for one in node["outputs"]) == kind.RETURN_TYPES
        given |= {name: value for name, value in linked.items() if value is not None}
        outputs = getattr(kind(), kind.FUNCTION)(**given)
        for output, value in zip(node["outputs"], outputs, strict=True):
            made |= dict.fromkeys(output["links"], value)
