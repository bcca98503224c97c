// Attention in bf16 on AMX tiles, over pages of a multiple of 16 tokens; otherwise as attention.h describes. Items of
// few rows, as decodes have, are computed by attention_decodes.h, larger ones by attention_prompts.h, with the same
// bits.
#pragma once

#include "attention_decodes.h"
#include "attention_prompts.h"

#include <memory>

namespace {

// Rows of an item: a transposed block of V serves all of its strips. Items have fewer rows where threads would be idle.
constexpr int kMaxTileRows = 384, kItemsPerThread = 4;

}  // namespace

#if defined(PENSTOCK_TILES)
namespace {

class TileAttention {
 public:
  static bool fits(const Problem& problem) { return tiles::available() && problem.page_size % tiles::kSide == 0; }
  static int queries_of_item(int group, int rows) { return std::max(1, rows / group); }

  explicit TileAttention(const Problem& p) : blocks(p) { tiles::configure(tiles::kSide); }
  ~TileAttention() { tiles::release(); }

  // Computes an item. `next` is the item that likely follows, or null.
  void run(const Item& item, const Item* next) {
    if (item.num_queries * blocks.group <= DecodeAttention::kMaxRows) {
      if (!decodes) decodes = std::make_unique<DecodeAttention>(blocks);
      decodes->run(item, next);
    } else {
      const int max_rows = queries_of_item(blocks.group, kMaxTileRows) * blocks.group;
      if (!prompts) prompts = std::make_unique<PromptAttention>(blocks, max_rows);
      prompts->run(item, next);
    }
  }

 private:
  const TileBlocks blocks;
  // Each is made for the first item that needs it.
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
