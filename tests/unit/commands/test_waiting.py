"""A waiting command reports the reason at once, and repeats the report at intervals."""

from __future__ import annotations

from kproxy.runtime.notify import MAX_SENTENCES, REMIND_S, Reminders


def test_sentence_is_due_at_once_and_periodically() -> None:
    now = 100.0
    reminders = Reminders(lambda: now)
    assert reminders.is_due("a")
    assert not reminders.is_due("a")
    # Alternating reasons are each reported once, not at each change.
    assert reminders.is_due("b")
    assert not reminders.is_due("a")
    now += REMIND_S - 1
    assert not reminders.is_due("a")
    now += 1
    assert reminders.is_due("a")
    assert not reminders.is_due("a")


def test_varying_sentences_take_bounded_memory() -> None:
    reminders = Reminders(lambda: 0.0)
    for number in range(MAX_SENTENCES * 3):
        assert reminders.is_due(str(number))
    assert reminders.is_due("0"), "forgotten"
    assert not reminders.is_due(str(MAX_SENTENCES * 3 - 1))
