import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib import pyplot

from diagd.files import (
    copy_whole,
    list_files,
    note_left_out,
    read_json_lines,
    read_json_object,
    read_lines,
    replacing,
    rewind_log,
    save_figure,
    write_json,
    write_text,
)

NAMES = ("plain.json", "Füße 走る 🎮.mp4", ".hidden", "no suffix", "a'b\"c$(d).txt")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_a_new_file_appears_whole_and_alone(name, tmp_path):
    with replacing(tmp_path / name) as temporary:
        temporary.write_bytes(b"half")
        assert not (tmp_path / name).exists()
        temporary.write_bytes(b"whole")
    assert names_in(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == b"whole"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_file_and_no_rubbish(error, tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"old")

    def write_half():
        with replacing(path) as temporary:
            temporary.write_bytes(b"ne")
            raise error

    with pytest.raises(error):
        write_half()
    assert names_in(tmp_path) == ["model.bin"]
    assert path.read_bytes() == b"old"


def test_a_writer_that_writes_nothing_is_noticed(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "a"):
        pass
    assert (tmp_path / "a").read_text() == "old"


def test_a_killed_process_leaves_the_old_file(tmp_path):
    path = tmp_path / "state"
    path.write_text("old")
    script = (
        "import os, signal, sys\n"
        "from diagd.files import replacing\n"
        "with replacing(sys.argv[1]) as temporary:\n"
        "    temporary.write_text('ne')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert done.returncode == -9
    assert path.read_text() == "old"
    left = [name for name in names_in(tmp_path) if name != "state"]
    assert all(name.startswith(".") and name.endswith(".partial") for name in left)
    write_text(path, "new")  # the rubbish is in nobody's way
    assert path.read_text() == "new"


def test_two_writers_do_not_meet(tmp_path):
    path = tmp_path / "kernels.so"
    with replacing(path) as first:
        first.write_text("first")
        with replacing(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert names_in(tmp_path) == ["kernels.so"]


def test_permissions_are_those_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_text("")
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "ours", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "ours").stat().st_mode) == 0o640
    write_text(tmp_path / "again", "text")
    modes = {(tmp_path / name).stat().st_mode for name in ("plain", "again")}
    assert len(modes) == 1


def test_text_is_utf8_and_replaces_what_was_there(tmp_path):
    write_text(tmp_path / "a", "a much longer text than the next")
    write_text(str(tmp_path / "a"), "Füße 走る")
    assert (tmp_path / "a").read_bytes() == "Füße 走る".encode()


def test_json_ends_in_a_newline_and_takes_paths(tmp_path):
    write_json(tmp_path / "a.json", {"clips": Path("走る.mp4"), "n": [1, None]}, indent=1)
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == {"clips": "走る.mp4", "n": [1, None]}
    assert text.count("\n") == 7
    assert text.endswith("}\n")


def test_what_is_no_json_is_refused_and_the_old_file_stays(tmp_path):
    write_json(tmp_path / "a.json", 1)
    with pytest.raises(TypeError, match="object"):
        write_json(tmp_path / "a.json", {"a": object()})
    assert (tmp_path / "a.json").read_text() == "1\n"
    assert names_in(tmp_path) == ["a.json"]


@pytest.mark.parametrize(
    "torn", [b"", b'{"step": 3', b"{", b'{"step": 3}', '{"a": "ü'.encode()[:-1]]
)
def test_a_torn_last_line_is_passed_over(torn, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "a": "\xc3\xbc"}\n' + torn)
    assert read_json_lines(path) == [{"step": 1}, {"step": 2, "a": "ü"}]


@pytest.mark.parametrize("line", ["[1]", "no json", "", "\udcff", '{"a": '])
def test_a_whole_line_that_is_no_object_is_named(line, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line.encode(errors="surrogateescape") + b'\n{"a": 2}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl:2: expected a JSON object, got "):
        read_json_lines(path)


def test_an_empty_file_has_no_lines_and_a_missing_one_is_an_error(tmp_path):
    (tmp_path / "log.jsonl").touch()
    assert read_json_lines(tmp_path / "log.jsonl") == []
    with pytest.raises(FileNotFoundError):
        read_json_lines(tmp_path / "none.jsonl")


MARK = b"\xef\xbb\xbf"


def test_a_line_ends_at_a_newline_and_the_last_ones_may_be_blank(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_bytes(MARK + "a\u2028b\r\n\nc\x85d\x0b\x0c\x1ce\rf\n\r\n \n\n".encode())
    assert read_lines(path, "texts") == ["a\u2028b", "", "c\x85d\x0b\x0c\x1ce\rf"]
    path.write_bytes(b"\n")
    assert read_lines(path, "texts") == []


def test_json_has_marks_and_blank_ends_as_texts_have(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(MARK + '{"a": "b\u2028\x85"}\r\n\r\n'.encode())
    assert read_json_object(path) == {"a": "b\u2028\x85"}
    assert read_json_lines(path) == [{"a": "b\u2028\x85"}]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("maus".encode("utf-16"), ", got UTF-16"),
        ("maus".encode("utf-16-le"), ""),
        ("mäuse".encode("latin-1"), ""),
    ],
)
def test_a_text_in_another_encoding_is_one_line(content, reason, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    for read in (lambda: read_lines(path, "texts"), lambda: read_json_object(path)):
        with pytest.raises(ValueError, match=rf"^{path}: expected a text file in UTF-8{reason}$"):
            read()


def test_a_file_holds_escapes_of_names_that_are_not_utf8(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    write_text(tmp_path / "a", f"<td>{name}</td>")
    assert (tmp_path / "a").read_bytes() == rb"<td>caf\udce9</td>"
    figure, axis = pyplot.subplots()
    axis.plot([1, 2], label=name)
    axis.set_title(name)
    axis.legend(title=name)
    save_figure(figure, tmp_path / "a.png")
    pyplot.close(figure)
    assert (tmp_path / "a.png").read_bytes()[1:4] == b"PNG"


def test_a_log_is_cut_back_to_a_step(tmp_path):
    path = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": step, "loss": 0.1 + 1e-17 * step}) + "\n" for step in range(6)]
    path.write_text("".join(lines) + '{"st')
    rewind_log(path, 3)
    assert path.read_text() == "".join(lines[:4])
    rewind_log(tmp_path / "none.jsonl", 3)
    assert names_in(tmp_path) == ["log.jsonl"]


def test_what_a_killed_writer_left_is_not_copied(tmp_path):
    source, goal = tmp_path / "tokenizer", tmp_path / "model" / "tokenizer"
    source.mkdir()
    (source / "config.json").touch()
    (source / ".config.json.0a1b2c3d.partial").touch()
    copy_whole(source, goal)
    assert [path.name for path in goal.iterdir()] == ["config.json"]


def test_the_folder_of_a_file_is_made(tmp_path):
    write_text(tmp_path / "results" / "new" / "table.md", "| |")
    assert [path.name for path in (tmp_path / "results" / "new").iterdir()] == ["table.md"]


def test_files_of_other_kinds_are_told_from_those_beside_clips(tmp_path):
    (tmp_path / "below").mkdir()
    names = ("b.MP4", "a.mp4", "a.jsonl", "actions.json", ".hidden", "c.psd", "no suffix")
    for name in (*names, "below/d.mp4", "below/e.doc"):
        (tmp_path / name).touch()

    def listed(**flags):
        both = list_files(tmp_path, "folder of clips", (".mp4",), **flags)
        return [[path.name for path in paths] for paths in both]

    assert listed() == [["a.mp4", "b.MP4"], ["c.psd", "no suffix"]]
    assert listed(below=True) == [["a.mp4", "b.MP4", "d.mp4"], ["e.doc", "c.psd", "no suffix"]]
    with pytest.raises(FileNotFoundError, match=r"folder of clips not found: .*nowhere"):
        list_files(tmp_path / "nowhere", "folder of clips", (".mp4",))


def test_what_is_left_out_is_named_once(tmp_path, capsys):
    for count in (0, 2, 2, 23):
        note_left_out(tmp_path, [tmp_path / f"{number:02}.doc" for number in range(count)])
    few, many = capsys.readouterr().err.splitlines()
    assert few == f"note: {tmp_path}: skipped files of other types: 00.doc, 01.doc"
    assert many.endswith(" 18.doc, 19.doc, 3 more")
