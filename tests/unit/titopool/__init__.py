"""The client, and what front ends and workers share."""
