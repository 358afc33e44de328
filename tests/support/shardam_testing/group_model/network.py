"""Messages on their way: any may come next, twice or not at all."""

from __future__ import annotations

from shardam_testing.group_model.messages import Address, Message

MOST = 100
"""Messages on their way; the oldest are lost beyond it."""


class Network:
    """A bag of messages, in the order in which they were sent."""

    def __init__(self) -> None:
        self._messages: list[Message] = []

    def __len__(self) -> int:
        return len(self._messages)

    def post(self, to: Address, body: object) -> None:
        """Puts a message on its way, unless it is already."""
        message = Message(to, body)
        if message not in self._messages:
            self._messages.append(message)
            del self._messages[:-MOST]

    def take(self, place: int, *, keep: bool = False) -> Message | None:
        """Takes a message out, or leaves it there to come again; None: there is none."""
        if not self._messages:
            return None
        place %= len(self._messages)
        return self._messages[place] if keep else self._messages.pop(place)
