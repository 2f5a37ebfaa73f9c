"""Retrieval by OpenAI's client library: embed passages, find the nearest, answer from it.

`pip install openai`.
It takes the embedding model and the chat model that are loaded, one beside the other.
"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("MLXTP_URL", "http://127.0.0.1:52415") + "/v1",
    api_key=os.environ.get("MLXTP_KEY", "none"),
)
MODEL = "default"  # the loaded model of each kind
PASSAGES = [
    "The code for Dorvan is QX-4821.",
    "The river was quiet in the morning.",
    "The code for Lumida is BT-9357.",
]
QUESTION = "What is the code for Lumida?"


def embed(texts: list[str], kind: str) -> list[list[float]]:
    """Return a vector of length 1 for each text. Models have prompts of their own for queries."""
    made = client.embeddings.create(model=MODEL, input=texts, extra_body={"input_type": kind})
    return [each.embedding for each in made.data]


def nearest() -> str:
    [question] = embed([QUESTION], "query")
    vectors = embed(PASSAGES, "document")
    likeness = [sum(a * b for a, b in zip(question, vector, strict=True)) for vector in vectors]
    return PASSAGES[likeness.index(max(likeness))]


def answer(passage: str) -> str:
    told = [{"role": "user", "content": f"{passage} {QUESTION}"}]
    completion = client.chat.completions.create(model=MODEL, messages=told, max_tokens=200)
    return completion.choices[0].message.content


passage = nearest()
print(f"== nearest\n{passage}")
print(f"== answer\n{answer(passage)}")
