from dataclasses import dataclass

import pytest

from diagd.data.actions import ActionVocabulary
from diagd.web.play.welcome import SPARE, keyboard_of

DOOM = ("none", "forward", "left", "right", "forward+left", "forward+right")


@dataclass(frozen=True)
class Joining(ActionVocabulary):
    combines = True


def test_words_of_walking_get_wasd_and_the_arrows():
    keyboard = keyboard_of(ActionVocabulary(DOOM))
    assert keyboard.idle == "none"
    assert keyboard.keys == {
        "forward": ("KeyW", "ArrowUp"),
        "left": ("KeyA", "ArrowLeft"),
        "right": ("KeyD", "ArrowRight"),
    }
    assert (keyboard.labels["KeyW"], keyboard.labels["ArrowUp"]) == ("W", "↑")
    assert keyboard.joined == ["forward+left", "forward+right"]
    assert not keyboard.combines


def test_the_words_of_fighting_get_keys_beside_those_of_walking():
    """Twelve actions are six keys, and some of them pressed together."""
    strafes = ("strafe_left", "strafe_right")
    attacks = ("attack", "attack+left", "attack+right", "attack+forward")
    keyboard = keyboard_of(ActionVocabulary((*DOOM, *strafes, *attacks)))
    fighting = {word: keyboard.keys[word] for word in (*strafes, "attack")}
    assert fighting == {
        "strafe_left": ("KeyQ",),
        "strafe_right": ("KeyE",),
        "attack": ("KeyF", "Space"),
    }
    assert keyboard.joined == ["forward+left", "forward+right", *attacks[1:]]


def test_the_first_key_of_a_word_goes_before_the_second_one_of_another():
    keyboard = keyboard_of(ActionVocabulary(("none", "attack", "jump")))
    assert keyboard.keys == {"attack": ("KeyF",), "jump": ("Space",)}


def test_words_nobody_knows_get_number_keys_in_order():
    keyboard = keyboard_of(ActionVocabulary(("rest", "dig", "jump", "sing")))
    assert keyboard.keys == {"dig": ("Digit1",), "jump": ("Space",), "sing": ("Digit2",)}


def test_no_key_means_two_things_and_words_are_left_over_only_when_keys_run_out():
    names = ("none", *(f"word{number}" for number in range(40)), "use", "strafe_right", "forward")
    keys = keyboard_of(ActionVocabulary(names)).keys
    taken = [key for found in keys.values() for key in found]
    assert len(taken) == len(set(taken))
    assert not set(taken) & {"KeyP", "KeyR", "KeyO", "KeyV"} - set(SPARE)
    assert set(keys) == set(names) - {"none"}
    assert not keys["word39"]


def test_a_joined_word_whose_parts_have_no_keys_is_left_out():
    keyboard = keyboard_of(ActionVocabulary(("none", "left", "left+fly")))
    assert (keyboard.joined, set(keyboard.keys)) == ([], {"left"})


@pytest.mark.parametrize("codec", [ActionVocabulary, Joining])
def test_a_page_is_told_whether_words_may_be_joined(codec):
    assert keyboard_of(codec(("none", "left"))).combines is codec.combines
