// Attention in bf16 on AMX tiles, over pages of a multiple of 16 tokens. Otherwise as in attention.h, which see. Items
// of few rows, as decodes have, are computed in attention_decodes.h, larger ones in attention_prompts.h; a row's bits are
// the same.
#pragma once

#include "attention_decodes.h"
#include "attention_prompts.h"

#include <memory>

namespace {

// Rows of an item: what is made of a block of V serves all strips of them. The fewer, where threads would go without.
constexpr int kMostTileRows = 384, kItemsOfThread = 4;

}  // namespace

#if defined(PENSTOCK_TILES)
namespace {

class TileAttention {
 public:
  static bool fits(const Problem& problem) { return tiles::available() && problem.page_size % tiles::kSide == 0; }
  static int queries_of_item(int group, int rows) { return std::max(1, rows / group); }

  explicit TileAttention(const Problem& p) : blocks(p) { tiles::configure(tiles::kSide); }
  ~TileAttention() { tiles::release(); }

  // `next` is what is likely to be computed after it, or null.
  void run(const Item& item, const Item* next) {
    if (item.num_queries * blocks.group <= DecodeAttention::kMostRows) {
      if (!decodes) decodes = std::make_unique<DecodeAttention>(blocks);
      decodes->run(item, next);
    } else {
      const int most_rows = queries_of_item(blocks.group, kMostTileRows) * blocks.group;
      if (!prompts) prompts = std::make_unique<PromptAttention>(blocks, most_rows);
      prompts->run(item, next);
    }
  }

 private:
  const TileBlocks blocks;
  // Made for the first item that needs them.
  std::unique_ptr<DecodeAttention> decodes;
  std::unique_ptr<PromptAttention> prompts;
};

}  // namespace
#else
struct TileAttention {
  static bool fits(const Problem&) { return false; }
  static int queries_of_item(int, int) { return 1; }
  explicit TileAttention(const Problem&) {}
  void run(const Item&, const Item*) {}
};
#endif

namespace {

// The items of `problem` for bf16 rows, and their computation.
inline std::vector<Item> list_items_of_bf16(const Problem& problem, int num_threads) {
  const int group = problem.num_heads / problem.num_kv_heads;
  if (!TileAttention::fits(problem)) return list_items(problem, queries_of_item(group));
  std::vector<Item> items;
  for (const int rows : {kMostTileRows, kMostTileRows / 2, kMostTileRows / 6}) {
    items = list_items(problem, TileAttention::queries_of_item(group, rows));
    if (num_threads == 1 || items.size() >= size_t(num_threads) * kItemsOfThread) break;
  }
  return items;
}

inline void attend_in_bf16(const Problem& problem, const std::vector<Item>& items, int num_threads) {
  if (!TileAttention::fits(problem)) return attend_by_vectors<BFloat16>(problem, items, num_threads);
  const int count = items.size();
  crew::share(num_threads, count, [&](crew::Pieces& pieces) {
    TileAttention attention(problem);
    for (int i; pieces.take(i);) attention.run(items[i], i + 1 < count ? &items[i + 1] : nullptr);  // likely next
  });
}

}  // namespace
