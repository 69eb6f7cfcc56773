"""The errors that reach a client, each with its HTTP status and a stable code.

    TitopoolError                         500  internal_error
    ├── ConfigError                       –    stops the start; never sent over HTTP
    ├── InvalidRequest                    400  invalid_request
    │   ├── PromptTooLong                 400  prompt_too_long
    │   ├── InvalidImage                  400  invalid_image
    │   └── ImageMismatch                 400  image_mismatch
    ├── Unauthorized                      401  invalid_api_key
    ├── ModelNotFound                     404  model_not_found
    ├── Conflict                          409  conflict
    ├── BodyTooLarge                      413  body_too_large
    ├── QueueFull                         429  queue_full
    ├── ClientGone                        499  client_gone
    ├── GenerationFailed                  500  generation_failed
    ├── WeightUpdateFailed                500  weight_update_failed
    ├── NoReadyWorker                     503  no_ready_worker
    │   ├── WeightsLost               503  weights_lost
    │   └── ModelChanged              503  model_changed
    └── DeadlinePassed                    504  deadline_passed

`code` is what clients branch on; `message` says what was expected, what came and what to
do. The text of these errors is sent to the client: an unexpected exception is none of them.
"""

from typing import ClassVar


class TitopoolError(Exception):
    """Base of all errors that are reported to a client."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    # OpenAI's `error.type`, which its client shows but does not branch on.
    type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def to_dict(self) -> dict[str, dict[str, str | None]]:
        """The JSON body of the answer, in OpenAI's shape."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "code": self.code,
                "param": self.param,
            }
        }


class ConfigError(TitopoolError):
    """A setting is unknown, impossible or contradicts another; the message names it."""

    code = "config_error"


class InvalidRequest(TitopoolError):
    """The body, a prompt or a sampling option is not what this server accepts."""

    status = 400
    code = "invalid_request"
    type = "invalid_request_error"


class PromptTooLong(InvalidRequest):
    """A prompt leaves no room for a single generated token."""

    code = "prompt_too_long"


class InvalidImage(InvalidRequest):
    """An image cannot be read, or is larger or more drawn out than the server takes."""

    code = "invalid_image"


class ImageMismatch(InvalidRequest):
    """The images of a prompt do not fit its placeholders."""

    code = "image_mismatch"


class Unauthorized(TitopoolError):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class ModelNotFound(TitopoolError):
    """The body names another model than the one that is served."""

    status = 404
    code = "model_not_found"
    type = "invalid_request_error"


class Conflict(TitopoolError):
    """The call does not fit the state of the weights; the message says what that is."""

    status = 409
    code = "conflict"
    type = "invalid_request_error"


class BodyTooLarge(TitopoolError):
    """The body is larger than `max_body_bytes`."""

    status = 413
    code = "body_too_large"
    type = "invalid_request_error"


class QueueFull(TitopoolError):
    """More prompts wait in this front-end process than `max_queued_prompts`."""

    status = 429
    code = "queue_full"
    type = "rate_limit_error"


class ClientGone(TitopoolError):
    """The client closed its connection; nobody reads this answer."""

    status = 499
    code = "client_gone"


class GenerationFailed(TitopoolError):
    """The engine failed on this request; others are not touched."""

    status = 500
    code = "generation_failed"


class WeightUpdateFailed(TitopoolError):
    """A weight update ended without its weights; the message says which weights serve."""

    status = 500
    code = "weight_update_failed"


class NoReadyWorker(TitopoolError):
    """No worker can generate now: still starting, restarting, or none is configured."""

    status = 503
    code = "no_ready_worker"


class WeightsLost(NoReadyWorker):
    """No worker has the weights of the last update any more."""

    code = "weights_lost"


class ModelChanged(NoReadyWorker):
    """The workers came back with another model than the request was checked for."""

    code = "model_changed"


class DeadlinePassed(TitopoolError):
    """The request did not end within `request_timeout_s`."""

    status = 504
    code = "deadline_passed"


def all_error_types(base: type[TitopoolError] = TitopoolError) -> list[type[TitopoolError]]:
    """Every error class of the tree above, `base` first."""
    found = [base]
    for child in base.__subclasses__():
        found.extend(all_error_types(child))
    return found


ERRORS_BY_CODE = {error.code: error for error in all_error_types()}
