"""Lists the attacks in the order in which they run. `docs/security.md` lists the same ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from benchmarks.attack.attacks import connections, grammars, messages, operators, quotas, readers, storms
from benchmarks.attack.target import AttackTarget

AttackFunction = Callable[[AttackTarget], Awaitable[None]]

ROOMS = (operators, messages, grammars, quotas, connections, readers, storms)
ATTACKS: Mapping[str, AttackFunction] = {attack.__name__: attack for room in ROOMS for attack in room.ATTACKS}
# The ordinary use from which an attack differs in one thing: the attack may slow others as much as that use does.
ORDINARY_USE: Mapping[AttackFunction, AttackFunction] = {
    attack: use for room in (quotas, readers, storms) for attack, use in room.ORDINARY_USE.items()
}


def describe(attack: AttackFunction) -> str:
    """Returns the first sentence of an attack's docstring."""
    assert attack.__doc__ is not None
    return attack.__doc__.strip().split("\n")[0]
