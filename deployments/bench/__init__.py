"""The yardstick: loads a server of the OpenAI API as its clients would, and says what they got."""
