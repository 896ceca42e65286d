"""OpenAI's Responses API: another writing of the requests and answers of a chat."""
