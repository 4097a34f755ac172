// llama.cpp's passes, timed on request, and its quantiser: compiled by llama_cpp.py against the libraries built there.
//
//     llama-steps quantise SOURCE TARGET q4_0|q2_k|q3_k_m|q4_k_m|q5_k_m|q6_k|q8_0
//     llama-steps serve MODEL THREADS LONGEST      then a request a line on standard input, an answer a line:
//       time CONTEXT WIDTH WANTED WARM ROUNDS      milliseconds of ROUNDS passes of WIDTH tokens behind CONTEXT others,
//                                                  logits wanted of the last WANTED; WARM passes before do not count
//       text COUNT TOKEN TOKEN ...                 the COUNT likeliest tokens behind these, one by one
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "llama.h"

static llama_context* context;

// Reads tokens behind the first `past`, wanting logits of the last `wanted`; returns milliseconds.
static double read(const std::vector<llama_token>& tokens, int past, int wanted) {
  const int count = static_cast<int>(tokens.size());
  llama_batch batch = llama_batch_init(count, 0, 1);
  batch.n_tokens = count;
  for (int i = 0; i < count; ++i) {
    batch.token[i] = tokens[i], batch.pos[i] = past + i, batch.n_seq_id[i] = 1, batch.seq_id[i][0] = 0;
    batch.logits[i] = i >= count - wanted;
  }
  const auto start = std::chrono::steady_clock::now();
  const int failed = llama_decode(context, batch);
  llama_synchronize(context);
  const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
  llama_batch_free(batch);
  if (failed) std::cerr << "llama_decode failed with " << failed << std::endl, exit(1);
  return taken.count();
}

static void forget(int first) { llama_memory_seq_rm(llama_get_memory(context), 0, first, -1); }

static std::vector<llama_token> some_tokens(int count) {
  std::vector<llama_token> tokens(count);
  for (int i = 0; i < count; ++i) tokens[i] = 100 + i * 37 % 1000;
  return tokens;
}

static void time_passes(std::istream& request) {
  static int held = 0;  // tokens that the cache is known to hold
  int past, width, wanted, warm, rounds;
  request >> past >> width >> wanted >> warm >> rounds;
  if (past != held) forget(0), held = past, past ? read(some_tokens(past), 0, 1) : 0;
  for (int round = -warm; round < rounds; ++round) {
    const double taken = read(some_tokens(width), past, wanted);
    if (round >= 0) std::cout << taken << ' ';
    forget(past);
  }
}

static void continue_text(std::istream& request, int vocabulary) {
  int count, past = 0;
  request >> count;
  std::vector<llama_token> tokens;
  for (llama_token token; request >> token;) tokens.push_back(token);
  forget(0);
  for (; count > 0; --count) {
    read(tokens, past, 1), past += static_cast<int>(tokens.size());
    const float* logits = llama_get_logits_ith(context, -1);
    tokens = {static_cast<llama_token>(std::max_element(logits, logits + vocabulary) - logits)};
    std::cout << tokens[0] << ' ';
  }
  forget(0);
}

int main(int, char** arguments) {
  const std::string mode = arguments[1];
  llama_log_set([](ggml_log_level level, const char* text, void*) { if (level == GGML_LOG_LEVEL_ERROR) std::cerr << text; }, nullptr);
  llama_backend_init();
  if (mode == "quantise") {
    const std::map<std::string, llama_ftype> kinds{
        {"q4_0", LLAMA_FTYPE_MOSTLY_Q4_0},     {"q8_0", LLAMA_FTYPE_MOSTLY_Q8_0},
        {"q2_k", LLAMA_FTYPE_MOSTLY_Q2_K},     {"q3_k_m", LLAMA_FTYPE_MOSTLY_Q3_K_M},
        {"q4_k_m", LLAMA_FTYPE_MOSTLY_Q4_K_M}, {"q5_k_m", LLAMA_FTYPE_MOSTLY_Q5_K_M},
        {"q6_k", LLAMA_FTYPE_MOSTLY_Q6_K}};
    llama_model_quantize_params options = llama_model_quantize_default_params();
    options.ftype = kinds.at(arguments[4]);
    return static_cast<int>(llama_model_quantize(arguments[2], arguments[3], &options));
  }
  llama_model* model = llama_model_load_from_file(arguments[2], llama_model_default_params());
  llama_context_params options = llama_context_default_params();
  options.n_threads = options.n_threads_batch = std::stoi(arguments[3]);
  options.n_ctx = options.n_batch = std::stoi(arguments[4]);
  context = model ? llama_init_from_model(model, options) : nullptr;
  if (!context) return 1;
  std::cout << "ready" << std::endl;
  for (std::string line, what; std::getline(std::cin, line); std::cout << std::endl) {
    std::istringstream request(line);
    request >> what;
    what == "time" ? time_passes(request) : continue_text(request, llama_vocab_n_tokens(llama_model_get_vocab(model)));
  }
}
