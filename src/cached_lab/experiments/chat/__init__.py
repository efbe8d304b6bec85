"""Chats and questions with a pretrained decoder that has a memory."""
