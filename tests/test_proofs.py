from tests.proofs import FEATURES, MODELS, PAGE, proofs, with_table


def test_the_table_of_models_is_what_the_tests_prove():
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "stale: run python -m tests.proofs"


def test_a_mark_names_models_and_features():
    marks = list(proofs())
    assert {model for model, *_ in marks} == set(MODELS)
    assert {feature for _, feature, *_ in marks} < set(FEATURES)
