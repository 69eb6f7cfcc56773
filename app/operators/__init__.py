"""Routes for who runs the server: health, requests, workers, metrics, the page, the description.

Runs in: each gunicorn process.
"""

from app.operators import description, health, requests, scrape, workers
from app.operators.page import history, overview, page

BLUEPRINTS = tuple(
    routes.blueprint
    for routes in (health, scrape, requests, workers, page, overview, history, description)
)
