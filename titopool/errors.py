"""The errors that reach a client, each with its HTTP status and a stable code.

    TitopoolError                         500  internal_error
    ├── ConfigError                       –    stops the start; never sent over HTTP
    ├── InvalidRequest                    400  invalid_request
    │   ├── PromptTooLong                 400  prompt_too_long
    │   │   └── ContextLengthExceeded     400  context_length_exceeded
    │   ├── InvalidImage                  400  invalid_image
    │   └── ImageMismatch                 400  image_mismatch
    ├── Unauthorized                      401  invalid_api_key
    ├── ForeignPage                       403  foreign_page
    ├── ModelNotFound                     404  model_not_found
    ├── WorkerNotFound                    404  worker_not_found
    ├── RequestNotFound                   404  request_not_found
    ├── SessionNotFound                   404  session_not_found
    ├── BodyTooSlow                       408  body_too_slow
    ├── Conflict                          409  conflict
    ├── SessionEnded                      410  session_ended
    ├── BodyTooLarge                      413  body_too_large
    ├── AnswerTooLarge                    413  answer_too_large
    ├── QueueFull                         429  queue_full
    ├── ClientGone                        499  client_gone
    ├── GenerationFailed                  500  generation_failed
    ├── WeightUpdateFailed                500  weight_update_failed
    ├── NoReadyWorker                     503  no_ready_worker
    │   ├── WeightsLost               503  weights_lost
    │   └── ModelChanged              503  model_changed
    └── DeadlinePassed                    504  deadline_passed

Clients branch on `code`. `message` says what was expected, what came and what to do; it is sent to
the client. An unexpected exception becomes an `internal_error` without its text.
"""

from typing import ClassVar

# Characters. A message may repeat what a client sent; its remedy stands at the end.
MAX_MESSAGE = 4_000


class TitopoolError(Exception):
    """Base of all errors that are sent to a client.

    Args:
        message: what was expected, what came and what to do; the middle of a long one is left out.
        param: the field of the body that is wrong.
        retry_after_s: seconds for the header Retry-After.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    # OpenAI's `error.type`. OpenAI's client shows it but does not branch on it.
    type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None):
        if len(message) > MAX_MESSAGE:
            half = MAX_MESSAGE // 2
            message = (
                f"{message[:half]} [… {len(message) - 2 * half} characters …] {message[-half:]}"
            )
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def to_dict(self, request_id: str = "") -> dict[str, dict[str, str | None]]:
        """The JSON body of the response, in OpenAI's format, with the request's id."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "code": self.code,
                "param": self.param,
                **({"request_id": request_id} if request_id else {}),
            }
        }


class ConfigError(TitopoolError):
    """A setting is unknown, out of range or contradicts another one; the message names the setting."""

    code = "config_error"


class InvalidRequest(TitopoolError):
    """This server does not accept the body, a prompt or a sampling option."""

    status = 400
    code = "invalid_request"
    type = "invalid_request_error"


class PromptTooLong(InvalidRequest):
    """A prompt leaves no room for one generated token."""

    code = "prompt_too_long"


class ContextLengthExceeded(PromptTooLong):
    """The input of a response leaves no room for one generated token; the code is OpenAI's."""

    code = "context_length_exceeded"


class InvalidImage(InvalidRequest):
    """An image cannot be read, is too large, or one side is too long for the other."""

    code = "invalid_image"


class ImageMismatch(InvalidRequest):
    """The images of a request do not match its prompts, their placeholders or the model."""

    code = "image_mismatch"


class Unauthorized(TitopoolError):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class ForeignPage(TitopoolError):
    """A web page of another site made the request, and the server requires no key."""

    status = 403
    code = "foreign_page"
    type = "permission_error"


class ModelNotFound(TitopoolError):
    """The body names a model that this server does not serve."""

    status = 404
    code = "model_not_found"
    type = "invalid_request_error"


class WorkerNotFound(TitopoolError):
    """The path names a worker that does not answer."""

    status = 404
    code = "worker_not_found"
    type = "invalid_request_error"


class RequestNotFound(TitopoolError):
    """The server keeps nothing of a request with this id."""

    status = 404
    code = "request_not_found"
    type = "invalid_request_error"


class SessionNotFound(TitopoolError):
    """The server has no session with this id that the key may use."""

    status = 404
    code = "session_not_found"
    type = "invalid_request_error"


class SessionEnded(TitopoolError):
    """The session was deleted, or had no call for `session_timeout_s`."""

    status = 410
    code = "session_ended"
    type = "invalid_request_error"


class BodyTooSlow(TitopoolError):
    """The client sends its body more slowly than the server waits for it."""

    status = 408
    code = "body_too_slow"
    type = "invalid_request_error"


class Conflict(TitopoolError):
    """The weights, the workers or an `Idempotency-Key` do not allow the call; the message says why."""

    status = 409
    code = "conflict"
    type = "invalid_request_error"


class BodyTooLarge(TitopoolError):
    """The body is larger than `max_body_bytes`, or has more lists, objects or keys than are read."""

    status = 413
    code = "body_too_large"
    type = "invalid_request_error"


class AnswerTooLarge(TitopoolError):
    """The answer may take more memory than the front end has for all."""

    status = 413
    code = "answer_too_large"
    type = "invalid_request_error"


class QueueFull(TitopoolError):
    """The request would exceed `max_open_requests` or `max_queued_prompts` of this front end, or its
    session `max_sessions` or `session_bytes`."""

    status = 429
    code = "queue_full"
    type = "rate_limit_error"


class ClientGone(TitopoolError):
    """The client closed its connection before the end of the response (nginx's status 499)."""

    status = 499
    code = "client_gone"


class GenerationFailed(TitopoolError):
    """A worker failed on this request, was lost during its stream, or sent an invalid result."""

    status = 500
    code = "generation_failed"


class WeightUpdateFailed(TitopoolError):
    """A worker failed on a weight update, or was lost during it."""

    status = 500
    code = "weight_update_failed"


class NoReadyWorker(TitopoolError):
    """No worker is ready, the tokenizer cannot be used now, or the server is stopping."""

    status = 503
    code = "no_ready_worker"


class WeightsLost(NoReadyWorker):
    """No worker has the weights of the last update, and no folder holds them."""

    code = "weights_lost"


class ModelChanged(NoReadyWorker):
    """The request was checked for a model that the workers no longer run."""

    code = "model_changed"


class DeadlinePassed(TitopoolError):
    """A request, or a command to a worker, did not finish in time."""

    status = 504
    code = "deadline_passed"


def all_error_types(base: type[TitopoolError] = TitopoolError) -> list[type[TitopoolError]]:
    """`base` and its subclasses in this module, depth first: what the server sends."""
    found = [base]
    for child in base.__subclasses__():
        if child.__module__ != __name__:
            continue
        found.extend(all_error_types(child))
    return found


ERRORS_BY_CODE = {error.code: error for error in all_error_types()}
