"""The paged graph: names of the inputs and outputs that every prepared OpenVINO model has.

Owns: the agreement between models/ (writes such graphs) and executors/ (runs them). Must not know: OpenVINO.

Shapes: T tokens of all rows of a step one after another, S rows (sequences), R rows that sample, V the logits' width
(the embedding's rows, which may be more than the true vocabulary), K the number of best candidates.
"""

# Inputs.
INPUT_IDS = "input_ids"  # i64 [T]
POSITION_IDS = "position_ids"  # i64 [T]
PAST_LENS = "past_lens"  # i32 [S]: tokens of each row already in the KV storage
SUBSEQUENCE_BEGINS = "subsequence_begins"  # i32 [S + 1]: where each row's tokens begin in [T]
BLOCK_INDICES = "block_indices"  # i32: block tables of all rows, one after another
BLOCK_INDICES_BEGINS = "block_indices_begins"  # i32 [S + 1]
MAX_CONTEXT_LEN = "max_context_len"  # i32 []: longest row, past and new tokens
SAMPLED_TOKENS_INDICES = "sampled_tokens_indices"  # i32 [R]: indices into [T] whose logits are wanted
KEY_CACHE_PREFIX = "key_cache."  # key_cache.N and value_cache.N for layer N: [num_blocks, kv heads, block size, head size]
VALUE_CACHE_PREFIX = "value_cache."

# Outputs.
LOGITS = "logits"  # f32 [R, 1, V]
TOP_VALUES = "top_values"  # f32 [R, 1, K], descending
TOP_INDICES = "top_indices"  # i32 [R, 1, K]
LOG_NORMALIZER = "log_normalizer"  # f32 [R, 1, 1]: log of the sum of exp(logits) over the true vocabulary

TOP_K = 64  # K, or V where that is smaller
BLOCK_SIZE = 32  # what the CPU plugin's paged attention takes

# In the prepared folder.
MODEL_FILE = "openvino_model.xml"
MANIFEST_FILE = "headrace.json"
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
GENERATION_DEFAULTS_FILE = "generation_config.json"
