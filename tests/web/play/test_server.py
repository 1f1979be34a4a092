import gc
from fractions import Fraction

from diagd.decoding.strategies.table import Exact
from diagd.pipeline.scenes import StartScene
from diagd.web.play.server import short_collections, warm_up
from diagd.web.play.session import Controls, Session
from tests.worlds import HEIGHT_PX, WIDTH_PX, smooth_frames


def test_what_is_warmed_up_is_what_will_be_played(generator, monkeypatch):
    used, advance = [], Session.advance

    def note(session, action, controls):
        used.append(controls)
        return advance(session, action, controls)

    monkeypatch.setattr(Session, "advance", note)
    scene = StartScene("here", smooth_frames(1, HEIGHT_PX, WIDTH_PX), (), Fraction(8))
    warm_up(generator, scene, Controls(Exact()))
    assert used == [Controls(Exact())] * 2


def test_collections_pass_over_what_was_there_before_while_people_play():
    with short_collections():
        assert gc.get_freeze_count() > 0
        assert len(gc.get_objects()) < gc.get_freeze_count()
    assert gc.get_freeze_count() == 0
