"""A seeded tenth of the random runs of a sync group under lost messages and crashes; `make fuzz` has the rest."""

from __future__ import annotations

from hypothesis import settings
from shardam_testing.group_model.machine import GroupMachine

TestGroupMachine = GroupMachine.TestCase
TestGroupMachine.settings = settings(deadline=None, derandomize=True, print_blob=True, max_examples=160, stateful_step_count=30)
