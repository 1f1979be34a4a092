"""The Hub, played by a local server: it keeps what the real client sends as a download is kept."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from huggingface_hub import constants

import diagd
from diagd.families import checkpoints
from diagd.families.checkpoints import is_repository, model_path
from diagd.pipeline.generate import PromptWorker
from diagd.pipeline.options import GenerateOptions
from tests.pipeline.test_world_folder import files_of
from tests.worlds import WALK

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return an empty folder of downloads; nothing is asked of the network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def keep(cache, repository, files):
    """Lay files out as the Hub's client does: blobs, and links to them in a snapshot."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    (folder / "blobs").mkdir(parents=True)
    for name, data in files.items():
        blob = folder / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        link = folder / "snapshots" / SHA / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(SHA)


@pytest.fixture
def hub(monkeypatch):
    """Serve the four requests of an upload; returns what was asked, and the files that came."""
    asked, files = [], {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            lines = [json.loads(line) for line in body.splitlines() if line.strip()]
            asked.append((self.path, self.headers["authorization"], lines[0]))
            answer = {"errors": [], "warnings": []}  # of the card's header
            if self.path == "/api/repos/create":
                name = f"{lines[0]['organization']}/{lines[0]['name']}"
                answer = {"url": f"{constants.ENDPOINT}/{name}"}
            elif "/preupload/" in self.path:
                answer = {
                    "files": [
                        {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for file in lines[0]["files"]
                    ]
                }
            elif "/commit/" in self.path:
                for line in lines[1:]:
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                answer = {
                    "commitUrl": f"{constants.ENDPOINT}/user/maze/commit/{SHA}",
                    "commitOid": SHA,
                    "success": True,
                }
            self.respond(answer)

        def do_GET(self):
            self.respond({"id": "user/maze", "sha": SHA, "siblings": []})

        def respond(self, answer):
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield asked, files
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_is_pushed_is_what_is_loaded(world, hub, cache, monkeypatch, command, tmp_path):
    asked, files = hub
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    original = diagd.VideoGenerator.from_pretrained(world)
    address = original.push_to_hub("user/maze", private=True, token="hf_secret")
    assert address.endswith("/user/maze")
    assert asked[0][0] == "/api/repos/create"
    created = asked[0][2]  # whose key is another one before huggingface_hub 1.8
    assert created.get("visibility", created.get("private")) in ("private", True)
    assert asked[-1][0] == "/api/models/user/maze/commit/main"
    assert {authorization for _, authorization, _ in asked} == {"Bearer hf_secret"}
    assert set(files) == {*files_of(world), "README.md", "generation.json"}
    assert 'from_pretrained("user/maze")' in files["README.md"].decode()
    assert not any(b"hf_secret" in data for data in files.values())

    keep(cache, "user/maze", files)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    loaded = diagd.VideoGenerator.from_pretrained("user/maze")
    prompt = world / "prompt.mp4"
    one, other = (w.generate(prompt, WALK, seed=3) for w in (original, loaded))
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.frames, other.frames)
    assert repr(loaded) == "VideoGenerator(user/maze: 24x40 px, 3x5 tokens, 4 actions)"
    monkeypatch.chdir(tmp_path)
    outcome = command("generate", "--model", "user/maze", "--frames", 2, "--json")
    assert (outcome.code, (tmp_path / "dream.mp4").exists()) == (0, True)


def test_the_folder_of_a_download_is_asked_for_once(world, cache, monkeypatch):
    keep(cache, "user/maze", files_of(world))
    worker = PromptWorker(GenerateOptions("user/maze", frames=2))
    asked, download = [], checkpoints.snapshot_download
    monkeypatch.setattr(
        checkpoints, "snapshot_download", lambda name: asked.append(name) or download(name)
    )
    assert [len(worker.read().frames) for _ in range(3)] == [4] * 3
    source = worker.world.source
    assert source is not None
    assert source.folder is source.folder
    assert len(asked) <= 1


def test_a_folder_of_that_name_comes_first(cache, tmp_path, monkeypatch):
    keep(cache, "user/maze", {"config.json": b"{}"})
    assert model_path("user/maze").name == SHA
    (tmp_path / "user" / "maze").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert str(model_path("user/maze")) == "user/maze"


def test_a_repository_that_is_not_there_is_one_line(cache, command):
    message = (
        "no model at 'user/none', neither a file or folder nor on the Hugging Face Hub: "
        "the Hub cannot be reached, and the model is not in the cache"
    )
    with pytest.raises(FileNotFoundError, match=f"{message}$"):
        diagd.VideoGenerator.from_pretrained("user/none")
    command("generate", "--model", "user/none").assert_refused(message)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        *(("user/maze", True), ("a-b/c.d_e", True), ("maze", False), ("./maze", False)),
        *(("/a", False), ("a/b/c", False), ("../maze", False), ("us er/x", False)),
    ],
)
def test_only_two_words_with_a_stroke_are_a_repository(name, is_one):
    assert is_repository(name) is is_one


def test_a_push_that_cannot_be_is_refused_in_one_line(world, monkeypatch, cache):
    generator = diagd.VideoGenerator.from_pretrained(world)
    with pytest.raises(ValueError, match="expected a repository such as user/name, got 'maze'"):
        generator.push_to_hub("maze")
    with pytest.raises(OSError, match=r"^user/maze cannot be uploaded: .*offline mode is enabled"):
        generator.push_to_hub("user/maze", token="hf_secret")


def test_a_hub_that_is_not_reached_is_one_line(world, monkeypatch, cache):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    generator = diagd.VideoGenerator.from_pretrained(world)
    with pytest.raises(OSError, match=r"^user/maze cannot be uploaded: .*refused") as caught:
        generator.push_to_hub("user/maze", token="hf_secret")
    assert "\n" not in str(caught.value)
