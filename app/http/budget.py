"""The memory that the requests of a front end may take together, estimated before it is taken."""

from titopool.errors import QueueFull

# A request that takes less than this is small. An eighth of the budget is for small ones only, so
# that large bodies do not keep them out.
SMALL_BYTES = 2**20
SMALL_SHARE = 8


class Budget:
    """Bytes that requests have reserved in one front end."""

    def __init__(self, limit: int):
        self.limit = limit
        self.taken = 0
        self.taken_by_small = 0


class Reservation:
    """The share of one request; `release` gives it back."""

    def __init__(self, budget: Budget):
        self._budget = budget
        self.taken = 0
        # Bytes of the request's body that have been read.
        self.num_body_bytes = 0
        self._is_released = False

    def check(self, num_bytes: int) -> None:
        """Raises QueueFull unless `num_bytes` more fit into the budget.

        A request may take more than the budget while all others are small.
        """
        budget, wanted = self._budget, self.taken + num_bytes
        others = budget.taken - self.taken
        small = budget.taken_by_small - (self.taken if self.taken <= SMALL_BYTES else 0)
        if others == small or others + wanted <= budget.limit - budget.limit // SMALL_SHARE:
            return
        if wanted <= SMALL_BYTES and small + wanted <= budget.limit // SMALL_SHARE:
            return
        raise QueueFull(
            f"expected requests that take at most {budget.limit} bytes of this front end together "
            f"(memory_budget_bytes), got one that takes {wanted} while others have {others}; retry "
            "later, or send fewer prompts in one request",
            retry_after_s=1,
        )

    def take(self, num_bytes: int) -> None:
        """Reserves `num_bytes` more; raises QueueFull as `check`."""
        self.check(num_bytes)
        self.add(num_bytes)

    def add(self, num_bytes: int) -> None:
        """Reserves `num_bytes` more, even beyond the budget; below 0: gives some back."""
        self.keep(self.taken + num_bytes)

    def keep(self, num_bytes: int) -> None:
        """Sets what is reserved to `num_bytes`, even beyond the budget; nothing after `release`."""
        if self._is_released:
            return
        for size, sign in ((self.taken, -1), (num_bytes, 1)):
            self._budget.taken += sign * size
            self._budget.taken_by_small += sign * size if size <= SMALL_BYTES else 0
        self.taken = num_bytes

    def release(self) -> None:
        """Gives all back; further calls do nothing."""
        self.keep(0)
        self._is_released = True
