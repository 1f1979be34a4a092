"""What is asked for goes before what the makers of a model do."""

from diagd.decoding.sampling import SamplingOptions
from diagd.families.defaults import GenerationDefaults


def test_an_exclusive_top_p_that_is_asked_for_stays():
    asked = SamplingOptions(1.0, top_p=0.5, exclusive_top_p=True)
    assert GenerationDefaults().sampling(asked, (0, 9)).exclusive_top_p
    assert GenerationDefaults(exclusive_top_p=True).sampling(None, (0, 9)).exclusive_top_p
    assert not GenerationDefaults().sampling(None, (0, 9)).exclusive_top_p
