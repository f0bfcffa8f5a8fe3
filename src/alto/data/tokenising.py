"""Tokens of texts: tokenises many texts in one call, and counts the first tokens that two texts share."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

__all__ = ["TextTokenizer", "Tokens", "Wanted", "num_shared"]


class Wanted(NamedTuple):
    """A text to be tokenised.

    Attributes:
        has_special: Whether to add the special tokens that the tokenizer puts around a text.
        has_starts: Whether the start of every token in the text is needed too.
    """

    text: str
    has_special: bool = False
    has_starts: bool = False


class Tokens(NamedTuple):
    """Token ids of a text, and the position of each token's first character; None if that is not needed, or the
    tokenizer is slow."""

    ids: list[int]
    starts: list[int] | None = None


@dataclass(frozen=True, slots=True)
class _Anchor:
    """An added token in a text: the parts before and after it are tokenised separately."""

    index: int
    start: int
    stop: int


class TextTokenizer:
    """A tokenizer of texts. A fast ``tokenizer`` takes many texts in one call, on all cores of the machine unless the
    environment variable ``TOKENIZERS_PARALLELISM`` is ``false``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.ids = lru_cache(maxsize=256)(lambda text: self.tokens([Wanted(text)])[0].ids)

    @cached_property
    def is_fast(self) -> bool:
        """Whether the tokenizer knows the positions of its tokens, and takes many texts at once."""
        return bool(getattr(self._tokenizer, "is_fast", False))

    def tokens(self, wanted: Sequence[Wanted]) -> list[Tokens]:
        """Tokenise every text, in order."""
        found: list[Tokens] = [Tokens([])] * len(wanted)
        for kind in {one[1:] for one in wanted}:
            places = [place for place, one in enumerate(wanted) if one[1:] == kind]
            for place, tokens in zip(
                places, self._of_kind([wanted[place].text for place in places], *kind), strict=True
            ):
                found[place] = tokens
        return found

    def _of_kind(self, texts: Sequence[str], has_special: bool, has_starts: bool) -> list[Tokens]:
        # Not verbose: the tokenizer would warn about rows beyond the model's length before they are cut.
        how: dict[str, Any] = {"add_special_tokens": has_special, "verbose": False}
        if not self.is_fast:
            return [Tokens(list(self._tokenizer(text, **how)["input_ids"])) for text in texts]
        encoded = self._tokenizer(list(texts), return_offsets_mapping=has_starts, **how)
        if not has_starts:
            return list(map(Tokens, encoded["input_ids"]))
        return [
            Tokens(ids, [first for first, _ in offsets])
            for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        ]

    def anchors(self, text: str, tokens: Tokens) -> list[_Anchor]:
        """Return the added tokens that divide ``text``, in order; none if the tokenizer has its own code."""
        starts = tokens.starts
        if starts is None:
            return []
        found = ((index, self._dividing[token]) for index, token in enumerate(tokens.ids) if token in self._dividing)
        return [
            _Anchor(index, starts[index], starts[index] + len(content))
            for index, content in found
            if text.startswith(content, starts[index])
        ]

    def num_before(self, before: str, text: str, ids: Sequence[int], anchors: Sequence[_Anchor]) -> int:
        """Return how many of ``ids``, the tokens of ``text``, are also the first tokens of ``before``.

        Tokenizers first take the added tokens out of a text, from left to right and the longest at every position; then
        they tokenise the parts between them one by one. So both texts have the same tokens up to an added token that
        both have, unless another added token that only one of them has can begin there. Only the rest of ``before``,
        from that added token on, is tokenised.
        """
        if text.startswith(before):
            num_anchors = bisect_right(anchors, len(before), key=lambda anchor: anchor.stop)
        else:
            num_equal = num_shared(before, text)
            num_anchors = bisect_right(anchors, num_equal - self._longest_added, key=lambda anchor: anchor.start)
        last = anchors[num_anchors - 1] if num_anchors else _Anchor(0, 0, 0)
        own = self.ids(before[last.start :])
        return last.index + num_shared(own, ids[last.index : last.index + len(own)])

    @cached_property
    def _dividing(self) -> dict[int, str]:
        """Ids and texts of added tokens that are found in a text whatever surrounds them."""
        tokenizer = self._tokenizer
        if not type(tokenizer).__module__.startswith("transformers.") or tokenizer.split_special_tokens:
            return {}
        return {
            number: token.content
            for number, token in tokenizer.added_tokens_decoder.items()
            if not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        }

    @cached_property
    def _longest_added(self) -> int:
        """Number of characters of the longest added token."""
        return max(map(len, self._tokenizer.get_added_vocab()), default=0)


def num_shared(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences of the same type."""
    length = min(len(first), len(second))
    return bisect_left(range(length), True, key=lambda place: first[: place + 1] != second[: place + 1])
