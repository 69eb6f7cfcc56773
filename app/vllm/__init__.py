"""vLLM's routes for token ids, which renderers, prime-rl, SkyRL and TRL call, and its tokenization.

Runs in: each gunicorn process. Requests and answers are those of vLLM 0.33
(`entrypoints/scale_out/token_in_token_out`). No tokenizer is loaded for ids.
"""

from app.vllm import routes, tokenize

BLUEPRINTS = (routes.blueprint, tokenize.blueprint)
