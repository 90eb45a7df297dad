#!/bin/bash
# An agent in another language: it drafts, asks for a check, prints the answer. It needs curl and jq.
# whet train examples/agent.yaml data.program='[examples/agent.sh]'
set -euo pipefail

say() {  # messages -> the text of the reply
  jq -c '{model: "policy", messages: .}' |
    curl --silent --show-error --fail-with-body "$OPENAI_BASE_URL/chat/completions" \
      -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" -d @- |
    jq -r '.choices[0].message.content // error(tojson)'
}

messages=$(cat)
draft=$(say <<< "$messages")
jq -c --arg draft "$draft" \
  '. + [{role: "assistant", content: $draft}, {role: "user", content: "Check it and give the final answer."}]' \
  <<< "$messages" | say
