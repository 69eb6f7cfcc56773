"""Chats, tools and other protocols' routes."""
