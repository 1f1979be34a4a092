"""Tables of results: columns are specified once; terminal, Markdown and page are made from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console

from diagd.console import print_table
from diagd.evaluation.results import BASELINES

Row = dict[str, Any]  # as in the JSON of a command


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    key: str  # of the value in a row; `psnr.mean` is row["psnr"]["mean"]
    heading: str
    form: str = "{}"  # formats a value
    interval: str | None = None  # key of the value's 95% interval, a pair
    better: Literal["higher", "lower"] | None = None  # of two values; None where neither is
    is_label: bool = False  # it names the row

    def value(self, row: Row) -> Any:
        return _look_up(row, self.key)

    def cell(self, row: Row, brackets: bool) -> str:
        """Format the value with its interval, in brackets or as plus and minus half its width."""
        value = self.value(row)
        interval = self.interval and _look_up(row, self.interval)
        if value is None:
            return "-"
        text = self.form.format(value)
        if not interval:
            return text
        low, high = interval
        if brackets:
            return f"{text} [{self.form.format(low)}, {self.form.format(high)}]"
        return f"{text} ±{self.form.format((high - low) / 2).lstrip('+')}"

    @property
    def titled(self) -> str:
        """The heading, with an arrow that points to better values."""
        return self.heading + {"higher": "↑", "lower": "↓", None: ""}[self.better]


def _look_up(row: Row, key: str) -> Any:
    name, _, rest = key.partition(".")
    value = row.get(name)
    return _look_up(value, rest) if rest and value is not None else value


MODEL = Column("model", "model", is_label=True)
STRATEGY = Column("strategy", "strategy", is_label=True)
CLIPS = Column("clips", "clips", is_label=True)


class Table:
    """Rows and columns, without those that hold nothing but labels."""

    def __init__(self, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        self.columns = [
            column
            for column in columns
            if column.is_label or any(column.value(row) is not None for row in rows)
        ]
        numbers = [column for column in self.columns if not column.is_label]
        self.rows = [row for row in rows if any(one.value(row) is not None for one in numbers)]

    def cells(self, brackets: bool) -> list[list[str]]:
        return [[column.cell(row, brackets) for column in self.columns] for row in self.rows]

    def best(self) -> set[tuple[int, int]]:
        """Return (row, column) of the best value among the strategies of each model."""
        found = set[tuple[int, int]]()
        for place, column in enumerate(self.columns):
            for model in {row["model"] for row in self.rows} if column.better else ():
                values = {
                    number: column.value(row)
                    for number, row in enumerate(self.rows)
                    if row["model"] == model and row["strategy"] not in BASELINES
                }
                known = {value for value in values.values() if value is not None}
                if len(known) > 1:
                    best = max(known) if column.better == "higher" else min(known)
                    found |= {(number, place) for number, value in values.items() if value == best}
        return found

    def print(self, console: Console) -> None:
        num_labels = sum(column.is_label for column in self.columns)
        header, cells = [column.heading for column in self.columns], self.cells(brackets=False)
        for model in dict.fromkeys(row["model"] for row in self.rows):
            own = [
                line for row, line in zip(self.rows, cells, strict=True) if row["model"] == model
            ]
            print_table(console, model, header, own, num_labels)

    def markdown(self) -> str:
        """Write the table as Markdown; the best values are bold."""
        best = self.best()
        lines = [
            [column.titled for column in self.columns],
            ["---" if column.is_label else "---:" for column in self.columns],
        ]
        for number, cells in enumerate(self.cells(brackets=True)):
            lines.append([f"**{c}**" if (number, i) in best else c for i, c in enumerate(cells)])
        escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
        return "\n".join("| " + " | ".join(line) + " |" for line in escaped)
