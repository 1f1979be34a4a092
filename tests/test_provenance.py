import subprocess

import torch

from diagd.system import cpu_name, fingerprint, git_commit, provenance


def git(folder, *arguments):
    who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    done = subprocess.run(["git", "-C", folder, *who, *arguments], capture_output=True, check=True)
    return done.stdout.decode().strip()


def test_a_commit_says_when_files_differ_from_it(tmp_path):
    assert git_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")[:12]
    assert git_commit(tmp_path) == commit
    (tmp_path / "file").write_text("b")
    assert git_commit(tmp_path) == f"{commit}-dirty"


def test_a_model_s_fingerprint_follows_its_weights_and_configs_only(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "tokenizer" / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("words")
    first = fingerprint(tmp_path)
    assert len(first) == 12
    (tmp_path / "README.md").write_text("other words")
    assert fingerprint(tmp_path) == first
    (tmp_path / "tokenizer" / "config.json").write_text("{ }")
    second = fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    assert len({first, second, fingerprint(tmp_path)}) == 3


def test_the_fingerprint_of_a_checkpoint_is_that_of_the_file(tmp_path):
    (tmp_path / "a.ckpt").write_bytes(b"weights")
    (tmp_path / "b.ckpt").write_bytes(b"Weights")
    (tmp_path / "other.json").write_text("{}")
    first = fingerprint(tmp_path / "a.ckpt")
    assert first != fingerprint(tmp_path / "b.ckpt")
    (tmp_path / "other.json").write_text("{ }")
    assert fingerprint(tmp_path / "a.ckpt") == first


def test_provenance_names_machine_and_versions():
    found = provenance(torch.device("cpu"))
    assert (found["device"], found["torch"], found["threads"]) == (cpu_name(), torch.__version__, 1)
