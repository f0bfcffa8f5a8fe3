"""Converts one conversation into token ids with a mask of the trained tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, TypeVar

from alto.data.dataset import Unread
from alto.data.messages import Conversation, Message
from alto.data.rows import ConversationError, quoted
from alto.data.template import ChatTemplate, TurnTexts, given_keys, without_key
from alto.errors import DataError
from alto.spec import TOOLS_TEMPLATE, TrainOn


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
        """Whether the tokenizer returns the positions of its tokens in the text, and accepts many texts in one call."""
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

        Tokenizers first find the added tokens in a text, from left to right, the longest at every position. Then they
        tokenise the parts between the added tokens one by one. Up to an added token of both texts, the tokens are
        therefore equal, unless a longer added token begins at the same place in only one of the texts. So only the rest
        of ``before`` is tokenised, from the last safe added token on.
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
        """Ids and texts of added tokens that are found in a text with any characters around them."""
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


_CHATML_TOKENS = {"<|im_start|>", "<|im_end|>"}

_GROUP_ROWS = 256
_GROUP_CHARACTERS = 2**17
"""Number of characters of a group of conversations that are tokenised together; all their tokens are in memory."""

_Result = TypeVar("_Result")
_Steps: TypeAlias = Generator[list[Wanted], list[Tokens], _Result]
"""A generator that asks for the tokens of texts, receives them, and goes on."""


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """Token ids of one conversation, and whether each is trained (replies and their end)."""

    input_ids: tuple[int, ...]
    is_trained: tuple[bool, ...]


def encode_prompt(turns: Conversation, tokenizer: Any) -> list[int]:
    """Return the token ids of ``turns`` and of the opening of a reply: the model's input to generate that reply.

    Raises:
        DataError: There is no turn, or the chat template refuses the turns.
    """
    if not turns:
        raise DataError("expected a turn before the assistant's reply, found the reply alone: there is no question")
    if turns[0].role == "text":
        wanted = [Wanted(turns[0].content, has_special=True)]
    elif not getattr(tokenizer, "chat_template", None):
        wanted = _turns_alone(turns)
    else:
        wanted = [Wanted(ChatTemplate(tokenizer).text(turns, open_turn=True))]
    return [token for tokens in TextTokenizer(tokenizer).tokens(wanted) for token in tokens.ids]


def closing_text(tokenizer: Any) -> str:
    """Return the template's text after a reply, without surrounding whitespace; empty if it writes nothing."""
    reply = "a reply"
    turns = Conversation((Message("user", "a question"), Message("assistant", reply)))
    return ChatTemplate(tokenizer).text(turns, open_turn=False).rpartition(reply)[2].strip()


@dataclass(frozen=True, slots=True)
class _Reply:
    """One trained turn.

    Attributes:
        turns: The conversation up to and including the turn.
        before: The model's input before it generates the turn.
        through: The template's text up to and including the turn.
        stem: ``through`` without the EOS token that a template puts after the last turn (Phi-3).
        is_apart: Whether adding the turn leaves the text before it unchanged; the opening of a reply may change (R1
            opens a thought that a finished reply does not have).
    """

    turns: Conversation
    before: str
    through: str
    stem: str
    is_apart: bool

    @property
    def written(self) -> str:
        """The template's text of the turn after the opening of a reply."""
        is_prefix = self.through.startswith(self.before)
        return self.through[len(self.before) if is_prefix else num_shared(self.before, self.through) :]


class Encoder:
    """An encoder for the conversations of one split, which counts the parts that the chat template leaves out.

    A conversation with many replies is rendered and tokenised once. But if the template looks ahead while it writes a
    turn (Qwen3, GLM, DeepSeek), every beginning of the conversation that ends before a reply is rendered separately;
    and if no added token divides the text, it is tokenised separately as well. Then time grows with the square of the
    number of replies.

    With ``train_on="all"``, every token is trained, including those of turns after the last reply; with ``"last"``,
    only the last reply; otherwise all replies.

    The template's ``{% generation %}`` marks the trained tokens of a turn, as in TRL's ``assistant_only_loss``. Without
    it, training begins at the first token that differs between two texts: the turns so far with the opening of a reply,
    and the same turns with the reply (TRL's ``completion_only_loss``). So a token that merges the end of the opening
    with the beginning of the reply is trained. The token that ends the turn is trained too; it is the next turn's
    opening if the template writes no end (GLM). Everything after the last trained turn is left out. A row always ends
    with the EOS token, if there is one.

    Plain text, and a raw prompt with its completion, are joined as they are. The EOS token's text is added if they do
    not end with it, and they are tokenised with the tokenizer's special tokens, as in TRL: a token that merges the end
    of the prompt with the beginning of the completion is trained.

    Args:
        tokenizer: Tokenizer of the base model.
        train_on: The tokens that are trained.
        follows_marks: Whether ``{% generation %}`` in the template decides which tokens of a reply are trained. TRL's
            preference trainers ignore it and train whole replies.
    """

    def __init__(self, tokenizer: Any, train_on: TrainOn = "completion", *, follows_marks: bool = True) -> None:
        self.num_shortened = 0
        self._train_on = train_on
        self._follows_marks = follows_marks
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer) if getattr(tokenizer, "chat_template", None) else None
        self._given: Counter[str] = Counter()
        self._unread: Counter[str] = Counter()
        self._texts = TextTokenizer(tokenizer)

    @property
    def unread(self) -> tuple[Unread, ...]:
        """Parts of the conversations encoded so far that did not change the template's output."""
        return tuple(
            Unread(what=name, count=self._unread[name], total=total)
            for name, total in self._given.items()
            if self._unread[name]
        )

    def rows(self, conversation: Conversation) -> list[EncodedRow]:
        """Convert one conversation to token ids with the tokenizer's chat template (or plainly, if it has none).

        Returns:
            One row, or none if nothing is to be trained. If the template rewrites earlier turns when another is added
            (Qwen3 removes thoughts from them), one row for every trained turn, with the turns before it as the model
            sees them when it generates that turn.

        Raises:
            ConversationError: The template refuses the turns, leaves out the tool call that is a whole reply, or
                rewrites the turns before a reply, so that the reply's tokens cannot be identified.
        """
        [(_, rows)] = self.all_rows([conversation])
        if isinstance(rows, ConversationError):
            raise rows
        return rows

    def all_rows(
        self, conversations: Iterable[Conversation]
    ) -> Iterator[tuple[Conversation, list[EncodedRow] | ConversationError]]:
        """Yield each conversation with its rows, or with the error of :meth:`rows`; several are tokenised together."""
        for group in _groups(conversations):
            running = {place: self._steps(conversation) for place, conversation in enumerate(group)}
            wanted: dict[int, list[Wanted]] = {}
            found: dict[int, list[EncodedRow] | ConversationError] = {}
            answers: dict[int, list[Tokens] | None] = dict.fromkeys(running)
            while answers:
                wanted.clear()
                for place, answer in answers.items():
                    try:
                        # A generator that has not started takes no answer.
                        steps = running[place]
                        wanted[place] = next(steps) if answer is None else steps.send(answer)
                    except StopIteration as end:
                        found[place] = end.value
                    except ConversationError as error:
                        found[place] = error
                tokens = iter(self._texts.tokens([text for texts in wanted.values() for text in texts]))
                answers = {place: list(islice(tokens, len(texts))) for place, texts in wanted.items()}
            yield from ((conversation, found[place]) for place, conversation in enumerate(group))

    def _steps(self, conversation: Conversation) -> _Steps[list[EncodedRow]]:
        if self._train_on == "all":
            return [(yield from self._whole(conversation))]
        trained = [position for position, message in enumerate(conversation) if message.is_trained]
        if not trained:
            return []
        if self._train_on == "last":
            conversation, trained = with_last_reply(conversation), trained[-1:]
        conversation = conversation[: trained[-1] + 1]
        template = self._template
        if conversation[0].role == "text":
            return [(yield from _raw(conversation, self._tokenizer))]
        if template is None:
            self._count_unread(conversation, [])
            turns = list(zip(conversation, (yield _turns_alone(conversation)), strict=True))
            trained_tokens = [turn.is_trained for turn, tokens in turns for _ in tokens.ids]
            return [self._ended([token for _, tokens in turns for token in tokens.ids], trained_tokens)]
        texts = TurnTexts(template, conversation, is_recorded=len(trained) > 1)
        text = texts.whole
        replies = [self._reply(texts, conversation, position) for position in trained]
        self.num_shortened += sum(_is_shortened(reply) for reply in replies)
        is_one_row = all(text.startswith((reply.through, reply.stem)) for reply in replies)
        is_apart = all(reply.is_apart for reply in replies)
        # If the text before a reply is rewritten, only the marks show where the reply is.
        is_marked = template.is_marked(conversation) and self._texts.is_fast and (self._follows_marks or not is_apart)
        is_all_trained = all(turn.is_trained for turn in conversation if turn.role == "assistant")
        if is_marked and is_all_trained and (is_one_row or not is_apart):
            self._count_unread(conversation, [(conversation, text)])
            return [self._ended(*template.marked_tokens(conversation))]
        if not is_apart:
            raise ConversationError(
                "expected the chat template to leave the text before a reply unchanged when the reply is added, "
                "found that it rewrites it; set another chat_template"
            )
        parts = [(conversation, text, replies)] if is_one_row else [(one.turns, one.through, [one]) for one in replies]
        self._count_unread(conversation, [(turns, shown) for turns, shown, _ in parts])
        rows = []
        for shown_turns, shown, of_row in parts:
            [tokens] = yield [Wanted(shown, has_starts=True)]
            ids, mask = tokens.ids, self._mask(shown, tokens, of_row)
            if is_marked:
                marks = template.marked_tokens(shown_turns)[1]
                mask = [on and mark for on, mark in zip(mask, marks, strict=True)]
            rows.append(self._ended(ids, mask))
        return rows

    def _whole(self, conversation: Conversation) -> _Steps[EncodedRow]:
        """Encode ``conversation`` with all tokens trained."""
        if conversation[0].role == "text":
            raw = yield from _raw(conversation, self._tokenizer)
            return EncodedRow(raw.input_ids, (True,) * len(raw.input_ids))
        if self._template is None:
            self._count_unread(conversation, [])
            wanted = _turns_alone(conversation)
        else:
            wanted = [Wanted(self._template.text(conversation, open_turn=False))]
            self._count_unread(conversation, [(conversation, wanted[0].text)])
        ids = [token for tokens in (yield wanted) for token in tokens.ids]
        return self._ended(ids, [True] * len(ids))

    def _reply(self, texts: TurnTexts, conversation: Conversation, position: int) -> _Reply:
        through = texts.text(position + 1, open_turn=False)
        if position:
            before = texts.text(position, open_turn=True)
        else:
            # Templates refuse an empty conversation, so the opening of a reply is taken from after the first turn.
            before = texts.text(1, open_turn=True).removeprefix(through)
        stem = self._without_eos(through) if self._ends_before_eos else through
        is_apart = through.startswith(before)
        if not is_apart and position:
            closed = self._without_eos(texts.text(position, open_turn=False))
            is_apart = before.startswith(closed) and through.startswith(closed)
        return _Reply(conversation[: position + 1], before, through, stem, is_apart)

    def _mask(self, text: str, tokens: Tokens, replies: Sequence[_Reply]) -> list[bool]:
        """Return whether each token of ``text`` is part of one of ``replies``, which occur in it in order."""
        ids, starts = tokens
        anchors = self._texts.anchors(text, tokens)
        mask = [False] * len(ids)
        last_stop = 0
        for reply in replies:
            begin = max(last_stop, self._texts.num_before(reply.before, text, ids, anchors))
            is_last = reply is replies[-1]
            if is_last:
                stop = len(ids)
            elif starts is None:
                stop = num_shared(self._texts.ids(reply.stem), ids)
            else:
                stop = bisect_left(starts, len(reply.through if text.startswith(reply.through) else reply.stem))
            mask[begin:stop] = [True] * len(ids[begin:stop])
            if not is_last and not self._ends_turns and ids[stop] in self._added_tokens:
                mask[stop] = True
                stop += 1
            last_stop = stop
        return mask

    @cached_property
    def _ends_turns(self) -> bool:
        """Whether the template writes something after a reply; in GLM's, the next turn's opening ends a reply."""
        return self._closing != ""

    @cached_property
    def _ends_before_eos(self) -> bool:
        """Whether the template writes an EOS token after the end of the last turn."""
        return self._closing is not None and bool(self._without_eos(self._closing).strip())

    @cached_property
    def _closing(self) -> str | None:
        """The template's text after a reply; None if it refuses a conversation of one question and one reply."""
        try:
            return closing_text(self._tokenizer)
        except DataError:
            return None

    @cached_property
    def _added_tokens(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_vocab().values())

    def _without_eos(self, text: str) -> str:
        eos = self._tokenizer.eos_token
        return text.removesuffix(eos) if eos else text

    def _ended(self, ids: list[int], trained: list[bool]) -> EncodedRow:
        eos = self._tokenizer.eos_token_id
        # Some templates put a newline after the token that ends a turn.
        if eos is not None and eos not in ids[-2:]:
            ids, trained = [*ids, eos], [*trained, True]
        return EncodedRow(tuple(ids), tuple(trained))

    def _count_unread(self, conversation: Conversation, shown: Sequence[tuple[Conversation, str]]) -> None:
        """Count the parts of ``conversation`` that the template does not read: without them, its output is the same.

        Args:
            shown: The turns of every row with the template's text of them; empty without a template.

        Raises:
            ConversationError: The template leaves out the tool calls that are a whole reply: only the reply's end would
                be trained.
        """
        for name, count in given_keys(conversation).items():
            self._given[name] += count
            if all(self._shown_text(without_key(turns, name)) == text for turns, text in shown):
                self._unread[name] += count
                calls = [turn for turn in conversation if turn.is_trained and name == "tool_calls"]
                bare = next((turn for turn in calls if not turn.content.strip() and name in turn.other_keys()), None)
                if bare is not None:
                    found = "no template to show" if self._template is None else "one that does not show"
                    raise ConversationError(
                        f"expected a chat template that shows tool calls, found {found} "
                        f"{quoted(bare.other_keys()[name])}: only the end of this reply would be trained; "
                        f"{tools_remedy(self._tokenizer)}"
                    )

    def _shown_text(self, conversation: Conversation) -> str | None:
        assert self._template is not None
        try:
            return self._template.text(conversation, open_turn=False)
        except DataError:
            return None


def tools_remedy(tokenizer: Any) -> str:
    """Return advice for a chat template that does not show tool calls."""
    if set(tokenizer.get_added_vocab()) >= _CHATML_TOKENS:
        return f"set chat_template: {TOOLS_TEMPLATE}, which shows them, or leave such rows out"
    return "use a base model that calls tools, set a chat_template that shows them, or leave such rows out"


def _is_shortened(reply: _Reply) -> bool:
    """Return whether words of the reply are missing in the template's text; whitespace may differ."""
    return _squeezed(reply.turns[-1].content) not in _squeezed(reply.written)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def with_last_reply(conversation: Conversation) -> Conversation:
    """Return ``conversation`` with only its last trained turn trained."""
    trained = [position for position, message in enumerate(conversation) if message.is_trained]
    turns = [
        replace(turn, is_context=True) if position in trained[:-1] else turn
        for position, turn in enumerate(conversation)
    ]
    return Conversation(turns, conversation.template_arguments, conversation.where)


def _raw(conversation: Conversation, tokenizer: Any) -> _Steps[EncodedRow]:
    """Encode a text, or a raw prompt and its completion, as they are."""
    *prompts, last = (turn.content for turn in conversation)
    prompt, eos = "".join(prompts), tokenizer.eos_token or ""
    last += "" if last.endswith(eos) else eos
    ids, *before = [
        tokens.ids
        for tokens in (
            yield [Wanted(text, has_special=True) for text in [prompt + last, *([prompt] if prompts else [])]]
        )
    ]
    begin = num_shared(before[0], ids) if before else 0
    return EncodedRow(tuple(ids), tuple(position >= begin for position in range(len(ids))))


def _turns_alone(conversation: Conversation) -> list[Wanted]:
    """Return every turn as a text of its own, so that its tokens do not depend on what follows it."""
    return [
        Wanted(
            message.content if message.role in ("assistant", "text") else message.content + "\n",
            has_special=position == 0,
        )
        for position, message in enumerate(conversation)
    ]


def _groups(conversations: Iterable[Conversation]) -> Iterator[list[Conversation]]:
    """Yield ``conversations`` in order, in groups that are tokenised together."""
    group: list[Conversation] = []
    num_characters = 0
    for conversation in conversations:
        group.append(conversation)
        num_characters += sum(len(turn.content) for turn in conversation)
        if len(group) == _GROUP_ROWS or num_characters >= _GROUP_CHARACTERS:
            yield group
            group, num_characters = [], 0
    if group:
        yield group
