"""A world behind two processes: sessions stay with theirs, one of which is killed."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import psutil

from diagd.client import Session
from tests.web.play.serving import wait_until
from tests.web.replicas import NEEDS_RAY_SERVE, replicas_of
from tests.worlds import smooth_frames

pytestmark = NEEDS_RAY_SERVE


def test_a_session_stays_with_its_replica_and_ends_with_it(spawn, world, serve):
    flags = "--port", 0, "--no-open", "--dtype", "float32", "--replicas", 2, "--replica-cpus", 0.5
    process = spawn("-m", "diagd", "play", "--model", world, *flags, PYTHONUNBUFFERED="1")
    lines = iter(process.stdout.readline, "")
    url = next(found[1] for line in lines if (found := re.search(r"at (http://\S+) in 2", line)))
    first = replicas_of(process)
    assert len(first) == 2
    picture = smooth_frames(1, 24, 40)[0].numpy()

    def play(session):
        """A scene, then a start of one's own, which goes beside the socket to the same replica."""
        frames = [session.reset(1, seed=4), *(session.step("left") for _ in range(5))]
        return np.stack([*frames, session.reset(picture, seed=5), session.step("forward")])

    with Session(serve().url) as alone:
        expected = play(alone)
    sessions = [Session(url) for _ in range(4)]  # two of each replica
    with ThreadPoolExecutor(4) as pool:
        for frames in pool.map(play, sessions):
            assert np.array_equal(frames, expected)
    killed = first[0]
    os.kill(killed.pid, signal.SIGKILL)
    ended = list[str]()
    for session in sessions:
        try:
            assert session.step("left").shape == expected[0].shape
            session.close()
        except ConnectionError as error:
            ended.append(str(error))
    assert ended == [f"{url}/: The process that generated this dream died: this dream is over."] * 2
    with Session(url) as again:  # at once, by the other
        assert np.array_equal(play(again), expected)
    assert httpx.get(f"{url}/sessions/of-nobody/session.json").status_code == 404
    wait_until(lambda: len({*replicas_of(process)} - {killed}) == 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "a replica failed\n" * 2)  # for each session
    psutil.wait_procs(first, timeout=30)
    assert not any(one.is_running() for one in first)
