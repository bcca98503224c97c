// Runs kernels of an ARM build on the arrays of a folder and writes their results there: tests/engine/cpu/test_arm.py.
#include "packed_weight.h"

#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

extern "C" void penstock_pack_linear(void*, const void*, int32_t, int32_t, int32_t);
extern "C" void penstock_linear(void*, const void*, const linear::PackedWeight*, int32_t, int64_t, int32_t);
extern "C" void penstock_paged_attention(void*, const void*, const void*, const int32_t*, const int32_t*,
                                         const int32_t*, int64_t, int64_t, int32_t, int32_t, int32_t, int32_t, int32_t,
                                         int32_t, int32_t, float, int32_t, int32_t, int32_t);

struct Folder {
  const std::string path;

  template <class T> std::vector<T> read(const char* name) const {
    std::ifstream file(path + "/" + name, std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
    const T* const values = reinterpret_cast<const T*>(bytes.data());
    return {values, values + bytes.size() / sizeof(T)};
  }
  template <class T> void write(const char* name, const std::vector<T>& values) const {
    std::ofstream(path + "/" + name, std::ios::binary)
        .write(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  }
};

// Multiplies rows with a weight of their dtype; the names of its arrays end with `suffix`.
template <class Stored>
void multiply(const Folder& folder, const std::string& suffix, linear::Kind kind, int num_threads) {
  const auto shape = folder.read<int32_t>("linear_shape");  // rows, outputs, inputs
  const int rows = shape[0], outputs = shape[1], inputs = shape[2];
  const auto weight = folder.read<Stored>(("weight" + suffix).c_str()), x = folder.read<Stored>(("rows" + suffix).c_str());
  std::vector<Stored> packed(weight.size()), out(size_t(rows) * outputs);
  penstock_pack_linear(packed.data(), weight.data(), outputs, inputs * sizeof(Stored) / 4, num_threads);
  const linear::PackedWeight product{packed.data(), nullptr, inputs, outputs, nullptr, nullptr, nullptr, kind, 0};
  penstock_linear(out.data(), x.data(), &product, rows, inputs, num_threads);
  folder.write(("product" + suffix).c_str(), out);
}

// Multiplies the rows, quantized to int8, with a weight of codes of this kind.
void multiply_integers(const Folder& folder, const std::string& name, linear::Kind kind, int num_threads) {
  const auto shape = folder.read<int32_t>("linear_shape");
  const int rows = shape[0], outputs = shape[1], inputs = shape[2];
  const auto codes = folder.read<uint8_t>((name + "_codes").c_str());
  const auto scales = folder.read<float>((name + "_scales").c_str());
  const auto x = folder.read<uint16_t>("any_rows");
  std::vector<uint16_t> out(size_t(rows) * outputs);
  const linear::PackedWeight product{nullptr, nullptr, inputs, outputs, codes.data(), scales.data(), nullptr, kind,
                                     inputs / linear::kDepth};
  penstock_linear(out.data(), x.data(), &product, rows, inputs, num_threads);
  folder.write((name + "_product").c_str(), out);
}

void attend(const Folder& folder, int num_threads) {
  // sequences, table width, heads, KV heads, page size, head dim
  const auto shape = folder.read<int32_t>("attention_shape");
  const auto q = folder.read<uint16_t>("q"), pool = folder.read<uint16_t>("pool");
  const auto table = folder.read<int32_t>("table"), starts = folder.read<int32_t>("starts");
  const auto contexts = folder.read<int32_t>("contexts");
  std::vector<uint16_t> out(q.size());
  const int64_t page_bytes = int64_t(2) * shape[3] * shape[4] * shape[5] * 2;
  penstock_paged_attention(out.data(), q.data(), pool.data(), table.data(), starts.data(), contexts.data(),
                           int64_t(shape[2]) * shape[5], page_bytes, shape[0], shape[1], shape[2], shape[3], shape[4],
                           shape[5], 0, 0.125f, 1, 0, num_threads);
  folder.write("attended", out);
}

int main(int, char** arguments) {
  const Folder folder{arguments[1]};
  multiply<uint16_t>(folder, "", linear::kPlain, 2);
  multiply<float>(folder, "_float32", linear::kFloat32, 2);
  multiply_integers(folder, "int8", linear::kInt8ByInt8, 2);
  multiply_integers(folder, "int4", linear::kInt4ByInt8, 2);
  attend(folder, 2);
}
