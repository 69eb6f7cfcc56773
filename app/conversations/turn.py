"""A turn of a session: its prompt goes on from ids that were sent and sampled, and it is kept at its end."""

import json
import time
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from app.conversations.following import as_read, follow_turn, json_of, short_of
from app.conversations.matching import context_of, link_of_turn, links_of, says, system_of
from app.conversations.store import (
    ExpertRows,
    Session,
    SessionStore,
    Turn,
    TurnHead,
    TurnKeys,
    digest_of,
    engine_ids_along,
    ids_along,
)
from app.inputs.chat_template import Chat
from app.inputs.images import PromptImages
from app.outputs.run_facts import RunFacts, kept_bytes
from app.outputs.sampled import Sampled
from app.route.fields import Message
from titopool.answers.sessions import Reason
from titopool.conversations.messages import with_images
from titopool.conversations.turns import Following, squeezed
from titopool.errors import InvalidRequest
from titopool.settings.sampling import SamplingOptions
from titopool.wire.messages import Chunk, Completed, Image, WorkerFacts

# Of the path to a turn that is gone on from.
FOLLOWED = ("short", "prompt", "ids", "engine_prompt")
# Characters.
MAX_MISMATCH = 300
# Kinds of prompts without messages.
TEXT, IDS = b"t", b"i"
LinkOf = Callable[[bytes, str, Message], bytes | None]


class Asking(Protocol):
    """What a turn needs of its call."""

    def use_tokenizer(
        self, function: Callable[..., Any], *arguments: Any, size: int = 0
    ) -> Any: ...

    def render(self, chats: Sequence[Chat]) -> list[list[int]]: ...


class SessionTurn:
    """One request in a session."""

    def __init__(
        self, store: SessionStore, session: Session, name: str, path: str, facts: WorkerFacts
    ):
        """`name`: the session's id; `path`: of the request; `facts`: of the model that runs it."""
        self._store, self._session, self._path, self._facts = store, session, path, facts
        # Turns of one session prefer the same worker.
        self.routing = digest_of(name).hex()
        self._parent: int | None = None
        self._num_parent = 0
        self._keys = TurnKeys(None)
        self._plain: list[bytes] = []
        # Of the sampled ids, their text and the message.
        self._link_of: LinkOf = lambda ids, text, message: None
        self._messages, self._short, self._added = list[Message](), list[Message](), list[Message]()
        self._images = list[Image]()
        # What the engine got and sampled until the end of the parent.
        self._engine_before = b""
        self._experts_start = 0
        self._reason: Reason = ""
        self._mismatch: str | None = None
        self._began_s = time.time()
        self._request_id = self._model = ""
        self._num_choices, self._is_kept = 1, False
        self._ids: np.ndarray | None = None
        self._run: RunFacts | None = None
        self._gained: defaultdict[int, Sampled] = defaultdict(Sampled)

    def messages_until(self, request_id: str) -> list[Message]:
        """The messages up to the answer to a request of the session, as `GET /sessions/{id}` has them.

        Raises:
            InvalidRequest: the session has no such answer.
        """
        number = self._store.number_of(self._session, request_id)
        if number is None:
            raise InvalidRequest(
                "previous_response_id: expected the id of a response in this session, got another; send all "
                "items as input",
                param="previous_response_id",
            )
        path = self._store.path_to(self._session, number, ("added",))
        files = self._store.images(self._session, path[-1].head.images)
        known = [message for one in path for message in (*json.loads(one.added), one.head.message)]
        found = with_images(known, [b64encode(one).decode() for one in files])
        return [dict(one) for one in found]

    # ---- its prompt --------------------------------------------------------------------

    def prompt_of_chat(self, call: Asking, chat: Chat, images: PromptImages) -> np.ndarray:
        """The prompt of a chat, int32: the ids of the turns that its messages are known to be, and those of
        its new messages; else a new branch, as the template writes it.

        Raises:
            TitopoolError: as `Call.render`.
            InvalidRequest: the chat has a template of its own.
        """
        if chat.chat_template is not None:
            raise InvalidRequest(
                "chat_template: expected none in a session, whose turns the model's own template writes, got "
                "one; leave it out, or send the chat outside of a session",
                param="chat_template",
            )
        messages = self._messages = chat.messages
        self._images = images.images
        context = context_of(chat, images.mm_processor_kwargs, self._facts.model)
        said = says(messages, images.digests)
        links, self._plain = links_of(context, said), links_of(b"", said)
        self._keys = TurnKeys(None, links[-1], None, system_of(messages))
        is_prompt = chat.add_generation_prompt and not chat.continue_final_message
        if is_prompt:
            self._link_of = lambda ids, text, message: link_of_turn(links[-1], message)
        ids = self._continued(call, chat, links) if is_prompt else None
        if ids is None:
            ids = np.array(call.render([chat])[0], np.int32)
            self._begin_branch(self._reason if is_prompt else "prefill")
        self._ids = ids
        return ids

    def _begin_branch(self, reason: Reason) -> None:
        self._parent, self._num_parent, self._reason = None, 0, reason
        self._short, self._added = [short_of(one) for one in self._messages], self._messages

    def _continued(self, call: Asking, chat: Chat, links: Sequence[bytes]) -> np.ndarray | None:
        """The ids of known turns and of the messages after them; None: a new branch begins."""
        known, num_known = self._store.match(self._session, links)
        if not known:
            return None
        number, new = _chosen(known, chat.messages[num_known - 1]), chat.messages[num_known:]
        if not new or any(one["role"] == "assistant" for one in new):
            # Nothing was sampled as these, so the template must write them.
            self._reason = "history"
            return None
        path = self._store.path_to(self._session, number, FOLLOWED)
        before = ids_along(path)
        sampled = np.frombuffer(path[-1].ids, np.int32)
        history = [message for one in path for message in json.loads(one.short)]
        size = sum(len(str(one.get("content"))) for one in new) + len(sampled)
        prompt = before[: len(before) - len(sampled)]
        said = as_read(path[-1].head.message)
        followed: Following | None = call.use_tokenizer(
            follow_turn, chat, history, prompt, sampled, said, new, len(self._images), size=size
        )
        if followed is None or followed.ids is None:
            self._reason = "template"
            return None
        self._follow(path, before)
        self._short, self._added = [short_of(dict(followed.message)), *map(short_of, new)], new
        self._mismatch = followed.difference and followed.difference[:MAX_MISMATCH]
        ids: np.ndarray = np.concatenate([before, followed.ids]).astype(np.int32)
        return ids

    def _follow(self, path: Sequence[Turn], before: np.ndarray) -> None:
        """`before`: the ids up to the end of the path."""
        parent = path[-1]
        self._engine_before = engine_ids_along(path).tobytes()
        self._parent, self._num_parent = parent.number, len(before)
        known = parent.head.experts
        if known is not None and known.end == parent.head.num_ids - 1:
            self._experts_start = known.end

    def prompt_of_raw(
        self,
        kind: bytes,
        content: bytes,
        encode: Callable[[bytes, bool], Sequence[int] | np.ndarray],
        decode: Callable[[np.ndarray], str],
    ) -> np.ndarray:
        """The prompt of a text or of ids without messages, int32: the ids of the longest known beginning,
        and those of the rest.

        Args:
            kind: `TEXT` or `IDS`.
            content: in UTF-8, or int32.
            encode: the ids of the rest, and whether that is the whole prompt.
            decode: the text of ids, with special tokens.
        """
        link_of = partial(raw_link, self._facts.model, kind)
        self._keys = TurnKeys(None, link_of(content))
        found = self._store.match_raw(
            self._session, lambda link: link == link_of(content[: length_of_raw(link)])
        )
        before, rest = np.empty(0, np.int32), content
        if found is not None:
            number, link = found
            path = self._store.path_to(self._session, number, FOLLOWED)
            after = content[length_of_raw(link) :]
            tail = _tail_of(path[-1], decode) if kind == TEXT else b""
            if tail is not None and after.startswith(tail):
                before, rest = ids_along(path), after[len(tail) :]
                self._follow(path, before)
            else:
                # The client writes another end of the turn than was sampled.
                self._reason = "template"
        if kind == TEXT:
            self._link_of = lambda ids, text, _: link_of(content + text.encode())
        else:
            self._link_of = lambda ids, text, _: link_of(content + ids)
        new = encode(rest, self._parent is None) if rest else ()
        self._ids = np.concatenate([before, np.array(new, np.int32)])
        return self._ids

    # ---- what is sampled ---------------------------------------------------------------

    def take(self, part: Chunk | Completed) -> int:
        """Takes what a stream has gained, or a whole result; returns the bytes that it keeps."""
        if self._ids is None:
            return 0
        if self._run is None:
            self._run = RunFacts(self._ids)
        self._run.begin(part)
        num_bytes = 0
        for index, piece in part.pieces if isinstance(part, Chunk) else enumerate(part.completions):
            self._gained[index].add(piece)
            num_bytes += kept_bytes(piece)
            num_bytes += len(piece.routed_experts.data) if piece.routed_experts else 0
        return num_bytes

    def begin(self, request_id: str, adapter: str, options: SamplingOptions) -> Callable[[], None]:
        """The request runs, which the end of its session aborts; what is called at its end.

        Args:
            adapter: "" for the base model.
            options: asks for all that samples have from now on.

        Raises:
            QueueFull: the sessions' file has no room for what it samples.
            TitopoolError: it cannot be used.
        """
        self._request_id, self._num_choices = request_id, options.n
        self._model = adapter or self._facts.model
        options.logprobs = options.logprobs or 0
        if self._facts.routed_expert_bytes:
            options.routed_experts_prompt_start = self._experts_start
        self._store.note_running(self._session, request_id)
        return self._end

    def _end(self) -> None:
        if not self._is_kept:
            self._store.forget_running(self._session, self._request_id)

    @property
    def has_ended(self) -> bool:
        """Whether all choices of a stream have come to their ends."""
        ended = [one.finish_reason for one in self._gained.values()]
        return len(ended) == self._num_choices and all(ended)

    def keep(self) -> Sequence[str]:
        """Keeps the turn once, one for each choice; returns why each begins a branch.

        Raises:
            SessionEnded: the session was deleted meanwhile.
            TitopoolError: the sessions' file cannot be used.
        """
        run, turns = self._run, []
        if run is None or self._ids is None or not self._gained or self._is_kept:
            return []
        engine_prompt = b"" if run.prompt_ids is self._ids else run.prompt_ids.tobytes()
        if engine_prompt and not engine_prompt.startswith(self._engine_before):
            # Images of the turns before have other numbers of tokens now. The rows that the engine was asked
            # for begin after the turns that were left.
            self._begin_branch("template")
            for gained in self._gained.values():
                gained.experts = None
        images = {one.digest: one.data for one in self._images}
        for index, gained in sorted(self._gained.items()):
            rows = gained.experts
            head = TurnHead(
                reason="choice" if index else self._reason,
                path=self._path,
                request_id=self._request_id,
                model=self._model,
                lora_version=run.adapter_version,
                began_s=self._began_s,
                ended_s=time.time(),
                finish_reason=gained.finish_reason,
                weight_versions=gained.weight_versions,
                images=[one.digest for one in self._images],
                image_ranges=run.image_ranges,
                experts=ExpertRows(rows.start, rows.shape, rows.dtype) if rows else None,
                mismatch=self._mismatch,
                message=gained.message(),
                num_prompt=len(run.prompt_ids),
                num_cached=run.num_cached,
                num_sampled=gained.num_tokens,
            )
            turn = Turn(
                parent=self._parent,
                head=head,
                short=json_of(self._short),
                prompt=self._ids[self._num_parent :].tobytes(),
                ids=bytes(gained.ids),
                logprobs=bytes(gained.logprobs),
                engine_prompt=engine_prompt,
                added=json_of(self._added),
                experts=rows.data if rows else b"",
            )
            read = as_read(head.message)
            link = self._link_of(turn.ids, gained.text_of("content"), read)
            plain = link_of_turn(self._plain[-1], read) if self._plain else None
            turns.append((turn, self._keys._replace(link=link, plain=plain)))
        reasons = self._store.add(self._session, turns, self._plain, images)
        self._is_kept = True
        return reasons


def _chosen(known: Sequence[Turn], sent: Message) -> int:
    """Which of several turns that say the same a client goes on from: that with its thought, else the first
    choice of the last request."""
    thought = squeezed(sent.get("reasoning") or "")
    for turn in known:
        if thought and squeezed(turn.head.message.get("reasoning") or "") == thought:
            return turn.number
    last = [turn.number for turn in known if turn.head.request_id == known[0].head.request_id]
    return last[-1]


def _tail_of(turn: Turn, decode: Callable[[np.ndarray], str]) -> bytes | None:
    """What ids say after the text that the client got of them: an end of text, a stop string; None: the
    text is not that of the ids."""
    whole, text = decode(np.frombuffer(turn.ids, np.int32)), turn.head.message["content"]
    if not whole.startswith(text):
        return None
    # A character of which the last id is a part only is in no answer.
    return whole.removeprefix(text).lstrip("\ufffd").encode()


def raw_link(model: str, kind: bytes, content: bytes) -> bytes:
    """A digest of a text or of ids, with their length."""
    digest = blake2b(content, digest_size=16, key=digest_of(model)).digest()
    return kind + len(content).to_bytes(8, "big") + digest


def length_of_raw(link: bytes) -> int:
    return int.from_bytes(link[1:9], "big")
