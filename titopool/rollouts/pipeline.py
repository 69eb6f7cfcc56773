"""The token pipeline of a trainer: prompts are tokenized once, here, and come back in a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from titopool.client.sync_client import Client
from titopool.conversations.interface import Ids, Image, PromptChanged
from titopool.conversations.messages import image_file, read_messages
from titopool.conversations.templates import make_template
from titopool.rollouts.batches import TokenBatch, pad_rollouts
from titopool.rollouts.sequence import RolloutArrays, arrays_of, sampled, written
from titopool.rollouts.state import image_ranges


@dataclass(frozen=True, eq=False)
class TokenPrompt:
    """A prompt as ids, and its images as files in base64."""

    ids: Ids
    images: tuple[str, ...] = ()


class TokenPipeline:
    """From text, conversations and ids to padded arrays, without a second tokenization.

    Args:
        client: `titopool.Client`.
        pad_id: fills the places of a batch without a token.
        tokenizer: transformers' tokenizer. None: the server tokenizes and renders.
        tools: schemas of tools, for the chat template.
        chat_template_kwargs: further variables of the template.
        max_prompt_tokens: the most tokens of a prompt, before images are expanded.
        truncation: what happens to a longer prompt: `refuse`, or `left`: its last tokens are kept,
            and the model gets and the batch has only these. Prompts with images are refused.
    """

    def __init__(
        self,
        client: Client,
        *,
        pad_id: int,
        tokenizer: Any = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_prompt_tokens: int | None = None,
        truncation: Literal["refuse", "left"] = "refuse",
    ):
        if truncation not in ("refuse", "left"):
            raise ValueError(f"truncation: expected refuse or left, got {truncation!r}")
        self._client = client
        self._pad_id = pad_id
        self._tokenizer = tokenizer
        self._template = make_template(client, tokenizer, tools, chat_template_kwargs)
        self._max_prompt_tokens = max_prompt_tokens
        self._truncation = truncation

    def tokenize(
        self, prompts: Sequence[Any], images: Sequence[Sequence[Image] | None] | None = None
    ) -> list[TokenPrompt]:
        """The ids of each prompt: a text, a conversation (list of messages), ids or a TokenPrompt.

        A text gets the special tokens that the tokenizer adds to a prompt.

        Args:
            images: of each prompt: for the image parts of a conversation that hold no image, or
                for the placeholders of a text or of ids.

        Raises:
            ValueError: a prompt is too long, or images do not fit.
        """
        if images is not None and len(images) != len(prompts):
            raise ValueError(
                f"images: expected an entry for each of {len(prompts)} prompts, got {len(images)}"
            )
        found = [
            self._tokenized(prompt, images[index] if images else None)
            for index, prompt in enumerate(prompts)
        ]
        return [self._fitting(one, f"prompts[{index}]") for index, one in enumerate(found)]

    def generate(self, prompts: Sequence[Any], **options: Any) -> TokenBatch:
        """The sequences of `sample`, padded."""
        return pad_rollouts(self.sample(prompts, **options), self._pad_id)

    def sample(
        self,
        prompts: Sequence[Any],
        *,
        images: Sequence[Sequence[Image] | None] | None = None,
        n: int = 1,
        **sampling: Any,
    ) -> list[RolloutArrays]:
        """Samples n completions of each prompt in one request, prompt-major.

        Raises:
            PromptChanged: the engine got other ids than were sent.
        """
        sent = self.tokenize(prompts, images)
        has_images = any(prompt.images for prompt in sent)
        results = self._client.generate(
            [prompt.ids for prompt in sent],
            images=[list(prompt.images) or None for prompt in sent] if has_images else None,
            n=n,
            **sampling,
        )
        found = []
        for index, (prompt, result) in enumerate(zip(sent, results, strict=True)):
            got = np.asarray(result.prompt_ids, np.int32)
            if not prompt.images and not np.array_equal(got, prompt.ids):
                raise PromptChanged(
                    f"prompts[{index}]: expected the engine to get the {len(prompt.ids)} ids that "
                    f"were sent, got {len(got)} others"
                )
            head, ranges = written(got), image_ranges(result, len(prompt.images))
            found += [
                arrays_of((head, sampled(one)), prompt.images, ranges) for one in result.completions
            ]
        return found

    def _tokenized(self, prompt: Any, images: Sequence[Image] | None) -> TokenPrompt:
        files = tuple(image_file(image) for image in images or ())
        if isinstance(prompt, TokenPrompt):
            return TokenPrompt(prompt.ids, prompt.images + files)
        if isinstance(prompt, str):
            known = self._tokenizer
            ids = self._client.tokenize(prompt) if known is None else known(prompt)["input_ids"]
            return TokenPrompt(np.array(ids, np.int32), files)
        if len(prompt) and isinstance(prompt[0], Mapping):
            messages, files = read_messages(prompt, images)
            return TokenPrompt(self._template.render(messages, files), files)
        return TokenPrompt(written(prompt).ids, files)

    def _fitting(self, prompt: TokenPrompt, location: str) -> TokenPrompt:
        most = self._max_prompt_tokens
        if most is None or len(prompt.ids) <= most:
            return prompt
        if self._truncation == "refuse" or prompt.images:
            raise ValueError(
                f"{location}: expected at most {most} tokens (max_prompt_tokens), got "
                f"{len(prompt.ids)}; shorten it, or truncate prompts without images on the left"
            )
        return TokenPrompt(prompt.ids[len(prompt.ids) - most :])
