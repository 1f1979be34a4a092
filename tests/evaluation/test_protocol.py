from diagd.evaluation.protocol import PROTOCOLS, Protocol, seed_of


def test_protocols_are_the_paper_s():
    assert {
        "cosmos": Protocol(100, 33, 9),
        "wham": Protocol(100, 100, 10, 10),
        "mc-ar": Protocol(100, 16, 1),
    } == PROTOCOLS


def test_seeds_differ_between_clips_and_follow_the_base_seed():
    assert seed_of("clip_1", 0) == seed_of("clip_1", 0)
    assert seed_of("clip_1", 5) == seed_of("clip_1", 0) + 5
    assert len({seed_of(f"clip_{n}", 0) for n in range(100)}) == 100
    assert all(0 <= seed_of(f"clip_{n}", 2**30) < 2**31 for n in range(100))
