from diagd.evaluation.options import PROTOCOLS, Protocol


def test_protocols_are_the_paper_s():
    assert {
        "cosmos": Protocol(100, 33, 9),
        "wham": Protocol(100, 100, 10, 10),
        "mc-ar": Protocol(100, 16, 1),
    } == PROTOCOLS
