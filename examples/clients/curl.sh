#!/bin/sh
# The endpoint from a shell: models, an answer, the same as it comes, a tool call, JSON, and an error.
set -eu

url="${MLXTP_URL:-http://127.0.0.1:52415}"
key="${MLXTP_KEY:-none}"        # only where the endpoint asks for one

ask() {                         # ask PATH [JSON]
  curl --silent --show-error --no-buffer "$url$1" \
    -H "Authorization: Bearer $key" -H "Content-Type: application/json" ${2:+-d "$2"}
  echo
}

echo "== models"
ask /v1/models

echo "== an answer"
ask /v1/chat/completions '{
  "model": "default",
  "messages": [{"role": "user", "content": "Repeat exactly: FALCON-MERCURY-7749"}]
}'

echo "== the same as it comes, with the number of tokens at the end"
ask /v1/chat/completions '{
  "model": "default",
  "messages": [{"role": "user", "content": "Repeat exactly: FALCON-MERCURY-7749"}],
  "stream": true,
  "stream_options": {"include_usage": true}
}'

echo "== a tool that has to be called"
ask /v1/chat/completions '{
  "model": "default",
  "messages": [{"role": "user", "content": "How is the weather in Oslo?"}],
  "tools": [{
    "type": "function",
    "function": {
      "name": "weather",
      "description": "The weather in a city.",
      "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Lisbon", "Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": false
      }
    }
  }],
  "tool_choice": "required"
}'

echo "== an answer that follows a JSON schema"
ask /v1/chat/completions '{
  "model": "default",
  "messages": [{"role": "user", "content": "Is water wet?"}],
  "response_format": {
    "type": "json_schema",
    "json_schema": {
      "name": "verdict",
      "schema": {
        "type": "object",
        "properties": {"wet": {"type": "boolean"}},
        "required": ["wet"],
        "additionalProperties": false
      }
    }
  }
}'

echo "== an error"
ask /v1/chat/completions '{"model": "gpt-9", "messages": [{"role": "user", "content": "Hello"}]}'
