"""Applies the hints of a request to its cached pages, and answers each of them. Pure.

It is called at the end of a request, while the request still holds its pages, and for requests that consist of hints
alone. It does not handle hints that bring pages back from lower tiers; the prefix cache does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence

from engine.cache.page_chains import ChainNode, PageChains
from engine.cache.retention.page_retention import PageRetention
from engine.cache.retention.reuse_policy import Gap, ReuseModel
from engine.cache.retention.sessions import Session, SessionTable
from penstock.kv.kv_hints import Hint, HintAnswer, HintOutcome, KvHints
from penstock.types import PageHash, PageId

_MAX_TAILS = 4  # turns of one session that may run in parallel


class SessionHints:
    """Owns the sessions of one worker. A call costs O(pages of the request and of the session's latest turns)."""

    def __init__(self, chains: PageChains, retention: PageRetention, num_references: Callable[[PageId], int]) -> None:
        """`num_references` says how many requests and transfers use a page."""
        self._num_references = num_references
        self._chains = chains
        self._retention = retention
        config = retention.config
        self.sessions = SessionTable(config.max_sessions, config.max_tenant_sessions)
        self._learns = config.eviction == "reuse"
        self._reuse = ReuseModel()
        self.num_answers: Counter[tuple[Hint, HintOutcome]] = Counter()

    def apply(self, owner: str, hints: KvHints, hashes: Sequence[PageHash], now_s: float) -> tuple[HintAnswer, ...]:
        """Follows the hints of this tenant's request, whose full pages have these hashes. Returns the answers."""
        nodes = self._chains.leading(hashes)
        own: frozenset[PageHash] = frozenset(() if hints.only else hashes)
        answers: list[HintAnswer] = []
        if hints.session:
            answers += self._on_session(owner, hints, nodes, own, now_s)
        if hints.demote:
            count = self._give_up(nodes[-1] if nodes else None, (), owner, own, now_s)
            answers.append(_answer(Hint.DEMOTE, count, len(nodes), "other requests or sessions share them"))
        elif hints.pin_s or hints.priority:
            answers += self._hold(owner, hints, nodes, len(hashes), now_s)
        if hints.end_session and hints.session:
            answers.append(self._end(owner, hints.session, own, now_s))
        self.num_answers.update((answer.hint, answer.outcome) for answer in answers)
        return tuple(answers)

    def give_up_own(self, owner: str, hashes: Sequence[PageHash], num_found: int, now_s: float) -> None:
        """Makes the pages that this tenant's request has added to the cache the next to be evicted, unless others use
        them. `num_found` leading pages were cached before.
        """
        nodes = self._chains.leading(hashes)
        if nodes:
            self._give_up(nodes[-1], frozenset(hashes[:num_found]), owner, frozenset(hashes), now_s)

    def _on_session(
        self, owner: str, hints: KvHints, nodes: list[ChainNode], own: Container[PageHash], now_s: float
    ) -> list[HintAnswer]:
        answers = [HintAnswer(Hint.SESSION, HintOutcome.ACCEPTED, num_pages=len(nodes))]
        session = self.sessions.find(owner, hints.session)
        if session is None:
            session = Session(Gap(now_s))
        elif not hints.only:
            self._reuse.learn(session.gap.on_turn(now_s, self._reuse.usual_gap_s))
        if hints.fork_of:
            answers.append(self._fork(owner, hints, session, nodes))
        if nodes and not (hints.only and session.tails):
            self._succeed(owner, session, nodes, own, now_s)
        self.sessions.put(owner, hints.session, session)
        if self._learns and not hints.only:
            family, pages = session.family, [node.page for node in nodes]
            num_shared = min(family.num_shared, len(pages)) if family.num_live > 1 else 0
            shared_s = self._reuse.handicap_s(session.gap, family.num_live)
            self._retention.set_handicap(pages[:num_shared], shared_s)
            self._retention.set_handicap(pages[num_shared:], self._reuse.handicap_s(session.gap))
        return answers

    def _succeed(
        self, owner: str, session: Session, nodes: list[ChainNode], own: Container[PageHash], now_s: float
    ) -> None:
        """Makes these pages the session's latest turn, and gives up those of the previous turn that it no longer uses.

        A turn continues the earlier turn with which it shares at least half of its pages. Other turns belong to chains
        that the session computes in parallel, such as agents that its client started under the same name.
        """
        places = {node.page_hash: index for index, node in enumerate(nodes)}
        kept: list[PageHash] = []
        for tail in session.tails:
            node, behind = self._chains.nodes.get(tail), 0
            while node is not None and node.page_hash not in places:
                node, behind = node.parent, behind + 1
            if node is not None and places[node.page_hash] + 1 >= behind:
                self._give_up(self._chains.nodes[tail], places, owner, own, now_s)
            elif tail in self._chains.nodes:
                kept.append(tail)
        session.tails = [*kept[-(_MAX_TAILS - 1) :], nodes[-1].page_hash]

    def _fork(self, owner: str, hints: KvHints, session: Session, nodes: list[ChainNode]) -> HintAnswer:
        """Makes the session a sibling of the one that it was forked from."""
        parent = self.sessions.find(owner, hints.fork_of)
        if parent is None or hints.fork_of == hints.session:
            return HintAnswer(Hint.FORK, HintOutcome.REFUSED, f"session {hints.fork_of!r} is not known here")
        num_shared = self._num_common(parent, nodes)
        if session.family is not parent.family:
            if self.sessions.find(owner, hints.session) is session:
                session.family.num_live -= 1
            session.family = parent.family
            session.family.num_live += 1
        family = session.family
        family.num_shared = min(family.num_shared or num_shared, num_shared)
        return _answer(Hint.FORK, num_shared, 1, "its pages are not cached here", needs_all=False)

    def _num_common(self, parent: Session, nodes: list[ChainNode]) -> int:
        """Returns how many leading pages of the chain belong to the parent's latest turns."""
        places = {node.page_hash: index for index, node in enumerate(nodes)}
        found = 0
        for tail in parent.tails:
            node = self._chains.nodes.get(tail)
            while node is not None and node.page_hash not in places:
                node = node.parent
            found = max(found, places[node.page_hash] + 1 if node is not None else 0)
        return found

    def _hold(
        self, owner: str, hints: KvHints, nodes: list[ChainNode], num_full: int, now_s: float
    ) -> list[HintAnswer]:
        limits = self._retention.config
        asked_s = hints.pin_s or limits.default_hold_s
        seconds = min(asked_s, limits.max_hold_s)
        pages = [node.page for node in nodes]
        num_held = self._retention.hold(pages, owner, hints.priority, now_s + seconds, now_s)
        reasons = []
        if num_held < len(pages):
            reasons.append(f"the tenant's quota admits {num_held} of {len(pages)} pages")
        if len(pages) < num_full:
            reasons.append(f"{len(pages)} of {num_full} pages are cached here")
        if seconds < asked_s:
            reasons.append(f"{seconds:g} of {asked_s:g} s are allowed")
        outcome = HintOutcome.CLIPPED if reasons else HintOutcome.ACCEPTED
        if not num_held:
            outcome = HintOutcome.REFUSED
            reasons = reasons or ["it has no full page"]
        asked = [hint for hint, is_asked in ((Hint.PIN, hints.pin_s), (Hint.PRIORITY, hints.priority)) if is_asked]
        return [HintAnswer(hint, outcome, "; ".join(reasons), num_held) for hint in asked]

    def _end(self, owner: str, name: str, own: Container[PageHash], now_s: float) -> HintAnswer:
        session = self.sessions.find(owner, name)
        assert session is not None  # `_on_session` has added it
        self.sessions.remove(owner, name)
        count = sum(self._give_up(self._chains.nodes.get(tail), (), owner, own, now_s) for tail in session.tails)
        return HintAnswer(Hint.END, HintOutcome.ACCEPTED, num_pages=count)

    def _give_up(
        self, tail: ChainNode | None, successor: Container[PageHash], owner: str, own: Container[PageHash], now_s: float
    ) -> int:
        """Gives up a chain from its last page back to where another one branches off; returns the number of pages.

        Keeps pages of `successor`, pages that another tenant holds or has cached, and pages that other requests use
        (the request itself has at most a reference to each page of `own`).
        """
        given_up: list[PageId] = []
        node, below = tail, None
        while node is not None and node.page_hash not in successor and not self._has_live_child(node, below):
            others = self._num_references(node.page) - (node.page_hash in own)
            if others > 0 or not self._retention.may_give_up(node.page, owner, now_s):
                break
            given_up.append(node.page)
            node, below = node.parent, node
        self._retention.give_up(given_up, now_s)
        return len(given_up)

    def _has_live_child(self, node: ChainNode, given_up: ChainNode | None) -> bool:
        return any(child is not given_up and not self._retention.is_given_up(child.page) for child in node.children())


def _answer(hint: Hint, count: int, asked: int, reason: str, *, needs_all: bool = True) -> HintAnswer:
    """Returns the answer for `count` of `asked` pages: accepted for all, clipped for some, refused for none."""
    if count >= asked and (count or not needs_all):
        return HintAnswer(hint, HintOutcome.ACCEPTED, num_pages=count)
    if not count:
        return HintAnswer(hint, HintOutcome.REFUSED, reason if asked else "no page of it is cached here")
    return HintAnswer(hint, HintOutcome.CLIPPED, reason, count)
