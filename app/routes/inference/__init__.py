"""vLLM's routes for token ids, which renderers, prime-rl, SkyRL and TRL call.

Runs in: each gunicorn process. Imports: `app.generation`, `app.streams`, `app.routes.vllm_rl`,
`outputs`, `inputs`, `schemas`, `http`. Requests and answers are those of vLLM 0.33
(`entrypoints/scale_out/token_in_token_out`). No tokenizer is loaded.
"""
