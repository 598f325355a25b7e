"""The OpenAI dialect: bodies, errors, streams. Pure."""
