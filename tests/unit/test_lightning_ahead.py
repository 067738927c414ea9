"""Loading one batch ahead: same items, same order, errors in their place."""

import threading

import pytest

from entrain_opt.lightning.ahead import AheadLoader, one_ahead


def test_order_and_length_are_those_of_the_plain_loader():
    for count in (0, 1, 5):
        assert list(AheadLoader(range(count), batch_size=None)) == list(range(count))


def test_the_next_item_is_made_while_one_is_used():
    begun = [threading.Event() for _ in range(3)]

    def items():
        for event in begun:
            event.set()
            yield event

    ahead = one_ahead(items())
    next(ahead)
    assert begun[1].wait(timeout=60)
    assert not begun[2].is_set()
    ahead.close()


def test_an_error_is_raised_where_its_item_would_have_come():
    def items():
        yield 1
        raise ValueError("broken file")

    ahead = one_ahead(items())
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="broken file"):
        next(ahead)
