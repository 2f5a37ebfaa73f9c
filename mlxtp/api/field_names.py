"""Fields that clients of other servers send and mlxtp does not take: ignored or refused, and why. Pure.

`docs/api.md` has the table. The bodies' schemas have the fields that are taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from ..errors import Code, RequestError

#: By the name of an API in `OtherFields`: its endpoint, or its part of a body.
APIS: Mapping[str, str] = {
    "chat": "`/v1/chat/completions`",
    "completions": "`/v1/completions`",
    "responses": "`/v1/responses`",
    "messages": "`/v1/messages`",
    "ollama": "`/api/chat`, `/api/generate`",
    "options": "Ollama's `options`",
    "stream_options": "`stream_options`",
    "embeddings": "`/v1/embeddings`",
    "ollama_embed": "`/api/embed`",
    "rerank": "`/v1/rerank`",
}
HEADER = "x-mlxtp-ignored"  #: names of the ignored fields of a request
MOST_TOLD = 20  #: names in the header, and in the log
MOST_NAME = 64  #: characters of a name
UNKNOWN = "no such field is known"


@dataclass(frozen=True, slots=True)
class OtherFields:
    """Fields with one reason, in some `apis`; without, in all that do not take them.

    An ignored field is named in the log and in the answer's header. `refused`: a 400, unless its value is
    null, false, 0 or empty.
    """

    names: str
    why: str
    refused: bool = False
    apis: str = ""


_FORMAT = "send response_format (responses: text.format, messages: output_config.format, Ollama: format)"
# fmt: off
OTHERS = (
    # without them the answer would be another
    OtherFields("structured_outputs guided_json guided_regex guided_choice guided_grammar regex ebnf "
                "json_schema grammar", f"constraints have another name in this API; {_FORMAT}", True),
    OtherFields("structural_tag", f"structural tags are not built; {_FORMAT}", True),
    OtherFields("stop_token_ids", "send stop strings, or the field to /v1/completions", True),
    OtherFields("stop_regex", "send stop, or stop_token_ids", True),
    OtherFields("allowed_token_ids", "send it to /v1/chat/completions or /v1/completions", True),
    OtherFields("bad_words bad_words_ids", "send bad_words to /v1/chat/completions or /v1/completions", True),
    OtherFields("include_stop_str_in_output no_stop_trim", "stop_reason has the stop string", True),
    OtherFields("use_beam_search length_penalty early_stopping num_beams", "send best_of, or n", True),
    OtherFields("best_of echo", "send it to /v1/completions", True),
    OtherFields("prompt_logprobs continue_final_message chat_template_kwargs", "not built in this API", True),
    OtherFields("lora_path lora adapters adapter_id", "serve a model with the adapter fused", True),
    OtherFields("custom_logit_processor logits_processors", "no code of a client runs here", True),
    OtherFields("prompt_embeds input_ids", "send text or token ids as prompt to /v1/completions", True),
    OtherFields("return_hidden_states return_routed_experts", "only tokens leave the ranks", True),
    OtherFields("logprob_token_ids", "send top_logprobs", True),
    OtherFields("truncate_prompt_tokens truncate", "nothing is cut from a prompt; send a shorter one", True),
    OtherFields("chat_template", "the model has its own; send chat_template_kwargs", True),
    OtherFields("suffix", "a prompt is continued, not filled in", True, "completions ollama"),
    OtherFields("functions function_call", "send tools and tool_choice", True, "chat"),
    OtherFields("audio", "answers are text", True, "chat"),
    OtherFields("modalities", "but text: answers are text", True, "chat"),
    OtherFields("conversation prompt moderation", "not built", True, "responses"),
    OtherFields("template context images", "send messages to /api/chat, as text", True, "ollama"),
    OtherFields("width height steps", "no images are made", True, "ollama"),
    # samplers and settings of other engines
    OtherFields("typical_p mirostat mirostat_tau mirostat_eta tfs_z top_n_sigma top_a min_keep samplers "
                "dynatemp_range dynatemp_exponent dry_multiplier dry_base dry_allowed_length "
                "dry_penalty_last_n dry_sequence_breakers adaptive_target adaptive_decay do_sample watermark "
                "watermarking repetition_detection", "a sampler that is not built"),
    OtherFields("repeat_last_n repetition_context_size presence_context_size frequency_context_size "
                "penalize_newline", "penalties count all tokens"),
    OtherFields("num_keep num_batch num_gpu main_gpu num_thread numa low_vram f16_kv logits_all vocab_only "
                "use_mmap use_mlock embedding_only n_keep n_discard n_indent id_slot n_cache_reuse "
                "draft_model num_draft_tokens", "the server chooses"),
    OtherFields("num_ctx", "the context is the model's", apis="options"),
    OtherFields("cache_prompt cache_control cache_salt prompt_cache_key prompt_cache_retention "
                "prompt_cache_options extra_key", "every prompt is cached, for each API key apart"),
    OtherFields("timings_per_token return_progress sse_ping_interval stream_interval",
                "events of a stream are at most three seconds apart, and show the progress of a prompt"),
    OtherFields("return_tokens response_fields post_sampling_probs n_probs details top_n_tokens "
                "decoder_input_details return_full_text return_meta_info return_cached_tokens_details "
                "return_prompt_token_ids return_token_offsets return_prompt_text return_weight_versions",
                "send logprobs or return_token_ids"),
    OtherFields("t_max_predict_ms", "send deadline_s"),
    OtherFields("skip_special_tokens spaces_between_special_tokens", "special tokens are not shown"),
    OtherFields("add_special_tokens add_generation_prompt", "the template or tokenizer writes them"),
    OtherFields("separate_reasoning stream_reasoning include_reasoning reasoning_format parse_tool_calls "
                "thinking_forced_open", "thoughts and calls are always separated"),
    OtherFields("thinking_token_budget thinking_budget_tokens reasoning_budget_tokens reasoning thinking "
                "enable_thinking", "max_tokens counts thoughts; send reasoning_effort"),
    OtherFields("documents guideline tool_prompt task role_mapping",
                "send it as text, or in chat_template_kwargs"),
    OtherFields("mm_processor_kwargs media_io_kwargs mm_payload return_mm_kwargs images_config "
                "max_dynamic_patch min_dynamic_patch use_audio_in_video", "models read text"),
    OtherFields("priority service_tier", "send the header x-mlxtp-priority"),
    OtherFields("keep_alive ttl", "the server chooses how long a model stays"),
    OtherFields("include_obfuscation", "no padding is sent"),
    # parts of a provider's platform, and of other programs
    OtherFields("metadata store", "nothing is kept", apis="chat completions"),
    OtherFields("safety_identifier", "user divides turns"),
    OtherFields("verbosity prediction web_search_options moderation", "OpenAI's alone", apis="chat"),
    OtherFields("truncation context_management max_tool_calls", "changes nothing", apis="responses"),
    OtherFields("access_programs image stream_options", "needs OpenAI's servers", apis="responses"),
    OtherFields("container inference_geo user_profile_id workspace_id diagnostics",
                "needs Anthropic's servers"),
    OtherFields("request_id rid session_id session_params chat_id id parent_id features variables tool_ids "
                "filter_ids tool_servers background_tasks files params custom_params custom_labels "
                "vllm_xargs ngram_corpus_id provider models transforms route plugins", "not this server's"),
    OtherFields("kv_transfer_params ec_transfer_params bootstrap_host bootstrap_port bootstrap_room "
                "routed_dp_rank disagg_prefill_dp_rank data_parallel_rank routed_experts_start_len "
                "routed_experts_prompt_start enable_response_messages previous_input_messages "
                "truncation_side", "not this cluster's"),
)
# fmt: on


_KNOWN = {
    api: {name: row for row in OTHERS if api in (row.apis or api).split() for name in row.names.split()}
    for api in APIS
}


def ignored(api: str, others: Mapping[str, bool | None]) -> tuple[str, ...]:
    """Return which of the fields that a body does not take are ignored: the first MOST_TOLD.

    `others`: whether each is more than 0, false or empty; None for null. Raises RequestError for a refusal.
    """
    found = []
    for name, means in others.items():
        row = _KNOWN[api].get(name)
        if means is not None and (row is None or not row.refused):
            found.append(name[:MOST_NAME])
        elif means and row is not None:
            raise RequestError(f"{name} is not supported: {row.why}", Code.NOT_SUPPORTED, param=name)
    return tuple(found[:MOST_TOLD])


def headers(names: Sequence[str]) -> dict[str, str]:
    """Return the header that names ignored fields, percent-encoded. A header cannot end in an empty one."""
    told = [quote(name, safe="")[:MOST_NAME] for name in names if name]
    return {HEADER: ", ".join(told)} if told else {}


def in_vain(api: str, name: str) -> bool:
    """Return True for a field that a body of this API has, and that changes nothing."""
    row = _KNOWN[api].get(name)
    return row is not None and bool(row.apis) and not row.refused


def reason(api: str, name: str) -> str:
    row = _KNOWN[api].get(name)
    return UNKNOWN if row is None else row.why
