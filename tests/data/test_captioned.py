"""Pictures with texts or classes beside them."""

import io
import json

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from diagd.data.captioned import Said, find_captioned


def picture(shade=0):
    return Image.fromarray(np.full((6, 9, 3), shade, np.uint8))


def stored(shade):
    whole = io.BytesIO()
    picture(shade).save(whole, "png")
    return whole.getvalue()


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, int):
            picture(content).save(path)
        else:
            path.write_text(content)


def read(folder, key: Said = "text"):
    return [(one.said, one.read()[0, 0, 0].item()) for one in find_captioned(folder, key)]


def test_texts_are_beside_pictures_in_lines_or_in_tables(tmp_path):
    files = {"a.png": 10, "a.txt": "a house\n", "b/c.png": 20, "b/c.txt": "red", "b/notes.md": ""}
    write(tmp_path, files)
    assert read(tmp_path) == [("a house", 10), ("red", 20)]
    lines = [{"file_name": "b/c.png", "text": "first"}, {"file_name": "a.png", "text": "second"}]
    write(tmp_path, {"metadata.jsonl": "".join(json.dumps(line) + "\n" for line in lines)})
    assert read(tmp_path) == [("first", 20), ("second", 10)]
    cells = [{"bytes": stored(30), "path": "x.png"}, {"bytes": stored(40), "path": None}]
    table = pyarrow.table({"image": cells, "text": ["x", "y"], "label": [7, 207]})
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=1)
    assert read(tmp_path) == [("x", 30), ("y", 40)]
    assert read(tmp_path, "label") == [("7", 30), ("207", 40)]
    plain = pyarrow.table({"image": [stored(50)], "text": ["z"]})
    parquet.write_table(plain, tmp_path / "u.parquet")
    assert read(tmp_path)[2:] == [("z", 50)]


def test_classes_are_the_names_of_folders_or_labels(tmp_path):
    write(tmp_path, {"class 207/a.png": 1, "5/deep.png": 2})
    assert read(tmp_path, "label") == [("5", 2), ("class 207", 1)]
    write(tmp_path, {"metadata.jsonl": '{"file_name": "5/deep.png", "label": 9}'})
    assert read(tmp_path, "label") == [("9", 2)]


@pytest.mark.parametrize(
    ("files", "key", "message"),
    [
        ({}, "text", r"no pictures \(\.png, .*\) in "),
        ({"a.png": 1}, "text", r"no texts: expected NAME\.txt beside each picture, metadata"),
        ({"a.png": 1, "a.txt": "x", "b.png": 1}, "text", r"text of a picture not found: .*b\.txt"),
        ({"a.png": 1, "a.txt": " \n"}, "text", r"a\.png: text must not be empty"),
        ({"a.png": 1}, "label", r"a\.png: expected pictures in folders named by class"),
        ({"metadata.jsonl": "{"}, "text", r"metadata\.jsonl:1: "),
        ({"metadata.jsonl": "{}"}, "text", r"jsonl:1: file_name must be a path inside the folder"),
        ({"metadata.jsonl": '{"file_name": "../a.png"}'}, "text", "must be a path inside"),
        ({"metadata.jsonl": '{"file_name": "a.png"}', "a.png": 1}, "text", "text must be a str"),
        ({"metadata.jsonl": '{"file_name": "a.png", "text": "x"}'}, "text", "picture not found"),
        ({"t.parquet": "torn"}, "text", r"t\.parquet cannot be read \(corrupt or truncated\)"),
    ],
)
def test_what_is_missing_is_told_by_its_file(files, key, message, tmp_path):
    write(tmp_path, files)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        find_captioned(tmp_path, key)


def test_tables_without_a_column_or_a_picture_are_refused(tmp_path):
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"image": [b"torn", None], "text": ["x", "y"]}), path)
    with pytest.raises(ValueError, match=r"t\.parquet: expected a column label, got image, text"):
        find_captioned(tmp_path, "label")
    torn, none = find_captioned(tmp_path, "text")
    with pytest.raises(ValueError, match=r"t\.parquet, row 0"):
        torn.read()
    with pytest.raises(ValueError, match=r"row 1: image must be the bytes of a file, got none"):
        none.read()
