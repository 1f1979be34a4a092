"""The database of a study: raters, the order and sides that each of them sees, and answers."""

import json
import random
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from diagd.files import require_folder
from diagd.web.study.pairs import StudyPairs
from diagd.web.study.results import Vote, summarise

CHOICES = ("left", "tie", "right")
MAX_RATERS = 1000
FORMAT = 1  # of the tables below
SCHEMA = """
CREATE TABLE study (definition TEXT NOT NULL, results_key TEXT NOT NULL);
CREATE TABLE raters (
    rater INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE COLLATE NOCASE,
    token TEXT NOT NULL UNIQUE, seed TEXT NOT NULL
);
CREATE TABLE trials (
    rater INTEGER NOT NULL REFERENCES raters, number INTEGER NOT NULL,
    comparison INTEGER NOT NULL, clip TEXT NOT NULL,
    first_is_left INTEGER NOT NULL CHECK (first_is_left IN (0, 1)),
    left_id TEXT NOT NULL UNIQUE, right_id TEXT NOT NULL UNIQUE,
    PRIMARY KEY (rater, number), UNIQUE (rater, comparison, clip)
);
CREATE TABLE answers (
    rater INTEGER NOT NULL, number INTEGER NOT NULL, question TEXT NOT NULL,
    choice TEXT NOT NULL CHECK (choice IN ('left', 'tie', 'right')),
    answered_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
    PRIMARY KEY (rater, number, question), FOREIGN KEY (rater, number) REFERENCES trials
);
"""


class Trial(NamedTuple):
    """A pair as one rater sees it: the columns of the table behind `rater`, and the answers."""

    number: int
    comparison: int  # index into the study's comparisons
    clip: str
    first_is_left: int  # 0 or 1: the comparison's first system is the video on the left
    left_id: str  # under what the videos are fetched
    right_id: str
    answers: dict[str, str]  # question -> one of `CHOICES`, as far as given


def draw_trials(clips: Sequence[str], num_comparisons: int, seed: str) -> list[Trial]:
    """Draw a rater's order of pairs and sides; each system stands left as often as right."""
    draw = random.Random(seed)
    drawn = []
    for comparison in range(num_comparisons):
        sides = [True, False] * ((len(clips) + 1) // 2)
        draw.shuffle(sides)
        drawn += [(comparison, clip, side) for clip, side in zip(clips, sides, strict=False)]
    draw.shuffle(drawn)
    return [
        Trial(number, pair, clip, side, secrets.token_urlsafe(12), secrets.token_urlsafe(12), {})
        for number, (pair, clip, side) in enumerate(drawn)
    ]


class StudyStore:
    """The SQLite database of one study, created if pairs are given; safe to use from threads."""

    def __init__(self, path: Path, pairs: StudyPairs | None = None) -> None:
        if pairs is None and not path.is_file():
            raise FileNotFoundError(f"no answers yet: {path} not found")
        require_folder(path.parent, "folder of the answers")
        self._lock = threading.Lock()
        with ExitStack() as on_error:
            try:
                self._connection = sqlite3.connect(
                    path, timeout=10, isolation_level=None, check_same_thread=False
                )
                on_error.callback(self._connection.close)
                self._prepare(path, pairs)
            except sqlite3.Error as error:
                raise ValueError(f"{path} cannot be used as a study's database: {error}") from None
            on_error.pop_all()

    def _prepare(self, path: Path, pairs: StudyPairs | None) -> None:
        for setting in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            self._connection.execute(f"PRAGMA {setting}")
        wanted: dict[str, Any] = {}
        if pairs is not None:
            wanted = {
                "comparisons": [list(pair) for pair in pairs.comparisons],
                "clips": list(pairs.clips),
                "questions": list(pairs.questions),
                "files": pairs.digest,
            }
        with self._transaction() as database:
            (found,) = database.execute("PRAGMA user_version").fetchone()
            (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if wanted and not tables:
                for statement in SCHEMA.split(";"):
                    database.execute(statement)
                study = json.dumps(wanted), secrets.token_urlsafe(16)
                database.execute("INSERT INTO study VALUES (?, ?)", study)
                database.execute(f"PRAGMA user_version = {FORMAT}")
            elif found != FORMAT:
                raise ValueError(f"{path} is no study database of this version")
            row = database.execute("SELECT definition, results_key FROM study").fetchone()
        self.definition: dict[str, Any] = json.loads(row[0])
        self.results_key: str = row[1]
        if changed := [name for name in wanted if wanted[name] != self.definition.get(name)]:
            raise ValueError(
                f"{path} holds answers to another study ({', '.join(changed)} differ): "
                f"choose another file with --answers"
            )

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._connection as database:  # which commits, or rolls back
            database.execute("BEGIN IMMEDIATE")
            yield database

    def enrol(self, name: str, seed: int) -> tuple[str, str]:
        """Add a rater, whose order and sides are drawn from the seed; ValueError if it is full.

        Returns the rater's secret token, and the name, with a number behind it if it is taken.
        """
        with self._transaction() as database:
            (count,) = database.execute("SELECT count(*) FROM raters").fetchone()
            if count >= MAX_RATERS:
                raise ValueError(f"this study is full: it has {MAX_RATERS} raters")
            name = known_as = name or f"anonymous {secrets.token_hex(3)}"
            same, namesakes = "SELECT 1 FROM raters WHERE name = ?", 1
            while database.execute(same, (known_as,)).fetchone():
                namesakes += 1
                known_as = f"{name} ({namesakes})"
            number, token = count + 1, secrets.token_urlsafe(16)
            rater = number, known_as, token, f"{seed}/{number}"
            database.execute("INSERT INTO raters VALUES (?, ?, ?, ?)", rater)
            clips, comparisons = self.definition["clips"], len(self.definition["comparisons"])
            drawn = draw_trials(clips, comparisons, f"{seed}/{number}")
            rows = [(number, *trial[:-1]) for trial in drawn]
            database.executemany("INSERT INTO trials VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        return token, known_as

    def _rows(self, query: str, *values: object) -> list[Any]:
        with self._transaction() as database:
            return database.execute(query, values).fetchall()

    def rater(self, token: str) -> tuple[int, str] | None:
        rows = self._rows("SELECT rater, name FROM raters WHERE token = ?", token)
        return rows[0] if rows else None

    def trials(self, rater: int) -> list[Trial]:
        rows = self._rows(
            "SELECT number, comparison, clip, first_is_left, left_id, right_id,"
            " (SELECT json_group_object(question, choice) FROM answers"
            "  WHERE answers.rater = trials.rater AND answers.number = trials.number)"
            " FROM trials WHERE rater = ? ORDER BY number",
            rater,
        )
        return [Trial._make((*row, json.loads(answers))) for *row, answers in rows]

    def answer(self, rater: int, number: int, question: str, choice: str) -> None:
        """Save an answer, in place of an earlier one; ValueError for no such question or trial."""
        if question not in self.definition["questions"] or choice not in CHOICES:
            raise ValueError(f"no such question or choice: {question!r}, {choice!r}")
        try:
            with self._transaction() as database:
                database.execute(
                    "INSERT INTO answers (rater, number, question, choice) VALUES (?, ?, ?, ?)"
                    " ON CONFLICT DO UPDATE SET"
                    " choice = excluded.choice, answered_at = CURRENT_TIMESTAMP",
                    (rater, number, question, choice),
                )
        except sqlite3.IntegrityError:
            raise ValueError(f"no such trial: {number}") from None

    def video(self, media_id: str) -> tuple[str, str] | None:
        rows = self._rows(
            "SELECT comparison, clip, first_is_left = (left_id = ?1)"
            " FROM trials WHERE ?1 IN (left_id, right_id)",
            media_id,
        )
        if not rows:
            return None
        comparison, clip, is_first = rows[0]
        first, second = self.definition["comparisons"][comparison]
        return first if is_first else second, clip

    def votes(self) -> list[Vote]:
        rows = self._rows(
            "SELECT name, comparison, clip, question, CASE"
            " WHEN choice = 'tie' THEN 'tie'"
            " WHEN (choice = 'left') = first_is_left THEN 'win' ELSE 'lose' END"
            " FROM answers JOIN trials USING (rater, number) JOIN raters USING (rater)"
            " ORDER BY rater, number, question"
        )
        return [Vote(*row) for row in rows]

    def results(self) -> dict[str, Any]:
        return summarise(self.definition["comparisons"], self.definition["questions"], self.votes())
