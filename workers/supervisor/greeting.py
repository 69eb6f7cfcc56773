"""The supervisor's last lines of a start: where the server answers, and a command to try."""

import urllib.error
import urllib.request

from titopool.settings.config import ServerConfig


def answers(url: str) -> bool:
    """Whether a GET of `url` gives 200 at once."""
    try:
        with urllib.request.urlopen(url, timeout=1) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def greeting(config: ServerConfig, url: str | None) -> str:
    """The last lines on the screen: what is served, and a command to try."""
    model = (
        config.model or "a tiny random demo model, which writes nonsense (name yours with MODEL)"
    )
    if url is None:
        return f"\ntitopool serves {model}."
    key = ' -H "Authorization: Bearer $TITOPOOL_API_KEY"' if config.api_key else ""
    return (
        f"\ntitopool serves {model} at {url}. Try it:\n\n"
        f"  curl -s {url}/generate/{key} -H 'Content-Type: application/json' \\\n"
        '    -d \'{"prompts": ["Hello, world"], "max_tokens": 8}\'\n'
    )
