import gc

from diagd.web.play.server import short_collections


def test_collections_pass_over_what_was_there_before_while_people_play():
    with short_collections():
        assert gc.get_freeze_count() > 0
        assert len(gc.get_objects()) < gc.get_freeze_count()
    assert gc.get_freeze_count() == 0
