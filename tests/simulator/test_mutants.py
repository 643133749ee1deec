"""Every planted fault is found by some check, or is known to change nothing."""

import pytest
from mutants import all_mutants, caught_by

# Changes that no result and no count can show, and why.
WITHOUT_EFFECT = {
    ("mask", "!(x < HIDDEN)", "true"): (
        "the score is hidden afterwards; the test keeps arithmetic off infinities"
    ),
    ("attention_delta", "&& !(lse_rows.value[0] < HIDDEN)", ""): (
        "every score of a row without a key is hidden; the test keeps numbers finite"
    ),
    ("mask", "<= n.Tk", "< n.Tk"): (
        "a block that ends with the last key pays for a predicate that hides nothing"
    ),
}


@pytest.mark.parametrize("mutant", all_mutants(), ids=str)
def test_planted_fault_is_found(mutant):
    change = mutant.header, mutant.before, mutant.after
    assert (caught_by(mutant) == "survived") == (change in WITHOUT_EFFECT)
