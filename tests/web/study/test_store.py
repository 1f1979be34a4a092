import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from diagd.web.study.pairs import StudyPairs
from diagd.web.study.store import StudyStore, draw_trials

CLIPS = {f"clip_{number}": None for number in range(5)}
PAIRS = StudyPairs(
    Path("pairs"), (("k=1", "raster"), ("k=2", "raster")), CLIPS, ("quality", "consistency"), "abc"
)


@pytest.fixture
def store(tmp_path):
    opened = StudyStore(tmp_path / "study.db", PAIRS)
    yield opened
    opened.close()


def enrolled(store, name="ann", seed=0):
    token, known_as = store.enrol(name, seed)
    number, found = store.rater(token)
    assert found == known_as == name
    return number


def test_every_rater_sees_every_pair_once_in_an_order_of_their_own(store):
    orders = []
    for name in ("ann", "bob"):
        trials = store.trials(enrolled(store, name))
        assert [trial.number for trial in trials] == list(range(10))
        orders.append([(trial.comparison, trial.clip) for trial in trials])
        assert set(orders[-1]) == {(c, clip) for c in (0, 1) for clip in CLIPS}
    assert orders[0] != orders[1]
    assert store.trials(1) == store.trials(1)


def test_each_system_stands_left_as_often_as_right():
    first_left = Counter()
    for rater in range(100):
        trials = draw_trials(["a", "b", "c", "d", "e"], 1, f"0/{rater}")
        left = sum(trial.first_is_left for trial in trials)
        assert left in (2, 3)
        first_left.update(trial.clip for trial in trials if trial.first_is_left)
    assert all(30 <= first_left[clip] <= 70 for clip in "abcde")  # 50 expected, sd 5


def test_a_seed_repeats_order_and_sides_but_not_the_ids():
    drawn = [draw_trials(["a", "b", "c"], 2, "7/1") for _ in range(2)]
    seen = [[(t.comparison, t.clip, t.first_is_left) for t in trials] for trials in drawn]
    assert seen[0] == seen[1]
    assert seen[0] != [(t.comparison, t.clip, t.first_is_left) for t in draw_trials("abc", 2, "8")]
    ids = {media for trials in drawn for t in trials for media in (t.left_id, t.right_id)}
    assert len(ids) == 4 * len(drawn[0])


def test_an_answer_for_a_side_is_a_vote_for_who_stood_there(store):
    rater = enrolled(store)
    for trial in store.trials(rater):
        choice = ("left", "tie", "right")[trial.number % 3]
        store.answer(rater, trial.number, "quality", choice)
    votes = {(vote.comparison, vote.clip): vote.outcome for vote in store.votes()}
    for trial in store.trials(rater):
        wins = "left" if trial.first_is_left else "right"
        expected = {"tie": "tie", wins: "win"}.get(trial.answers["quality"], "lose")
        assert votes[trial.comparison, trial.clip] == expected


def test_an_id_is_of_the_video_that_stands_there(store):
    for trial in store.trials(enrolled(store)):
        systems = PAIRS.comparisons[trial.comparison]
        left, right = systems if trial.first_is_left else systems[::-1]
        assert store.video(trial.left_id) == (left, trial.clip)
        assert store.video(trial.right_id) == (right, trial.clip)
    assert store.video("nothing") is None


def test_a_second_answer_replaces_the_first(store):
    rater = enrolled(store)
    for choice in ("left", "tie"):
        store.answer(rater, 3, "consistency", choice)
    assert [vote.outcome for vote in store.votes()] == ["tie"]
    assert store.trials(rater)[3].answers == {"consistency": "tie"}


def test_a_name_that_comes_back_is_a_new_rater(store):
    tokens, names = zip(*(store.enrol(name, 0) for name in ("Ann", "ann", "ann")), strict=True)
    assert names == ("Ann", "ann (2)", "ann (3)")
    assert [store.rater(token) for token in tokens] == list(enumerate(names, start=1))
    assert store.rater("") is None


def test_anonymous_raters_are_different_people(store):
    names = {store.enrol("", 0)[1] for _ in range(2)}
    assert len(names) == 2
    assert all(name.startswith("anonymous ") for name in names)


def test_a_study_takes_so_many_raters_and_no_more(store, monkeypatch):
    monkeypatch.setattr("diagd.web.study.store.MAX_RATERS", 1)
    store.enrol("ann", 0)
    with pytest.raises(ValueError, match="this study is full: it has 1 raters"):
        store.enrol("bob", 0)


@pytest.mark.parametrize(
    ("number", "question", "choice", "message"),
    [
        (10, "quality", "left", "no such trial: 10"),
        (0, "beauty", "left", "no such question or choice: 'beauty', 'left'"),
        (0, "quality", "up", "no such question or choice: 'quality', 'up'"),
    ],
)
def test_an_answer_to_nothing_is_refused(number, question, choice, message, store):
    rater = enrolled(store)
    with pytest.raises(ValueError, match=message):
        store.answer(rater, number, question, choice)
    assert store.votes() == []


def test_answers_are_there_when_the_database_is_opened_again(tmp_path):
    store = StudyStore(tmp_path / "study.db", PAIRS)
    token, _ = store.enrol("ann", 0)
    store.answer(1, 0, "quality", "tie")
    key, trials = store.results_key, store.trials(1)
    store.close()
    for pairs in (PAIRS, None):
        again = StudyStore(tmp_path / "study.db", pairs)
        assert (again.results_key, again.rater(token), again.trials(1)) == (key, (1, "ann"), trials)
        assert [vote.outcome for vote in again.votes()] == ["tie"]
        again.close()


def test_a_database_of_another_study_is_refused(tmp_path):
    StudyStore(tmp_path / "study.db", PAIRS).close()
    fewer = dict(list(CLIPS.items())[:4])
    other = StudyPairs(PAIRS.folder, PAIRS.comparisons, fewer, PAIRS.questions, "def")
    message = r"study\.db holds answers to another study \(clips, files differ\): choose another"
    with pytest.raises(ValueError, match=message):
        StudyStore(tmp_path / "study.db", other)


@pytest.mark.parametrize("pairs", [PAIRS, None])
def test_a_file_that_is_no_study_is_refused(pairs, tmp_path):
    (tmp_path / "text.db").write_text("no database at all, but long enough to look like one" * 9)
    with pytest.raises(ValueError, match=r"text\.db cannot be used as a study's database: file is"):
        StudyStore(tmp_path / "text.db", pairs)
    database = sqlite3.connect(tmp_path / "other.db")
    database.execute("CREATE TABLE cake (slices INTEGER)")
    database.close()
    with pytest.raises(ValueError, match=r"other\.db is no study database of this version"):
        StudyStore(tmp_path / "other.db", pairs)


def test_a_missing_database_or_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no answers yet: .*study\.db not found"):
        StudyStore(tmp_path / "study.db")
    with pytest.raises(FileNotFoundError, match=r"folder of the answers not found: .*nowhere"):
        StudyStore(tmp_path / "nowhere" / "study.db", PAIRS)
