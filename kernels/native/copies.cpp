// Copies with non-temporal stores, since most of what they write would be evicted from the caches before anybody reads
// it: of blocks into their pool, and of objects, whose checksum is taken in the same pass. `kernels/native/copies.py`
// calls them.

#include <immintrin.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "xxh3.h"

namespace {

using xxh3::Checksum;
using xxh3::kStripe;
using xxh3::load;

// The source is asked for this much ahead of its use.
constexpr int64_t kAhead = 1024;
// A file is read in pieces that stay in the second-level cache.
constexpr int64_t kPiece = 128 << 10;

struct Stripe {
  __m256i first, second;
};

Stripe copy_stripe(const uint8_t* from, uint8_t* to) {
  const Stripe stripe = {load(from), load(from + 32)};
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), stripe.first);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), stripe.second);
  return stripe;
}

void copy_stripe(const uint8_t* from, uint8_t* to, Checksum& checksum) {
  const Stripe stripe = copy_stripe(from, to);
  checksum.add_stripe(stripe.first, stripe.second);
}

void ask_for(const uint8_t* bytes) { _mm_prefetch(reinterpret_cast<const char*>(bytes) + kAhead, _MM_HINT_T0); }

// The whole stripes that a checksum of `num_bytes` adds before its end: the rest is 1 to 64 bytes.
int64_t bytes_before_end(int64_t num_bytes) { return (num_bytes - 1) / kStripe * kStripe; }

// Reads until there are `num_bytes`, or the file ends. Returns the bytes that were read, or -errno.
int64_t read_all(int file, uint8_t* to, int64_t num_bytes, int64_t position) {
  int64_t total = 0;
  while (total < num_bytes) {
    const ssize_t count = pread(file, to + total, num_bytes - total, position + total);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return -errno;
    if (count == 0) break;
    total += count;
  }
  return total;
}

// Reads an object whose last bytes are a checksum, and takes the checksum that they should be. Returns as `read_all`.
int64_t read_object(int file, int64_t position, int64_t num_bytes, uint8_t* piece, uint8_t* to, uint8_t* digest) {
  Checksum checksum;
  const int64_t checked = num_bytes - xxh3::kDigestBytes, before_end = bytes_before_end(checked);
  int64_t at = 0;
  while (at < num_bytes) {
    const int64_t wanted = std::min(kPiece, num_bytes - at), count = read_all(file, piece, wanted, position + at);
    if (count < 0) return count;
    const int64_t copied = std::max<int64_t>(0, std::min(count / kStripe * kStripe, before_end - at));
    for (int64_t i = 0; i < copied; i += kStripe) copy_stripe(piece + i, to + at + i, checksum);
    memcpy(to + at + copied, piece + copied, count - copied);
    at += count;
    if (count < wanted) return at;
  }
  checksum.finish(to + checked - kStripe, checked, digest);
  return at;
}

}  // namespace

// Copies `head` and then `body` to `target`, and the checksum of both behind them. The head is whole stripes, both
// together have more than 240 bytes, and `target` is aligned to 32 bytes.
extern "C" void radixkv_copy_checked(const uint8_t* head, int64_t head_bytes, const uint8_t* body, int64_t body_bytes,
                                     uint8_t* target) {
  Checksum checksum;
  const int64_t num_bytes = head_bytes + body_bytes, copied = bytes_before_end(num_bytes);
  int64_t at = 0;
  for (; at < head_bytes && at < copied; at += kStripe) copy_stripe(head + at, target + at, checksum);
  for (; at < copied; at += kStripe) {
    ask_for(body + at - head_bytes);
    copy_stripe(body + at - head_bytes, target + at, checksum);
  }
  if (at < head_bytes) memcpy(target + at, head + at, head_bytes - at);
  const int64_t start = at < head_bytes ? head_bytes : at;
  if (start < num_bytes) memcpy(target + start, body + start - head_bytes, num_bytes - start);
  checksum.finish(target + num_bytes - kStripe, num_bytes, target + num_bytes);
  _mm_sfence();  // whoever is told of the copy sees it
}

// Reads objects, each of more than 256 bytes into memory aligned to 32 bytes. `counts` gets the bytes there were of
// each, `digests` the checksums of those that are whole. Returns 0, or -errno of what failed.
extern "C" int64_t radixkv_read_checked(int file, int64_t num_objects, const int64_t* positions, const int64_t* sizes,
                                        uint8_t* const* targets, int64_t* counts, uint8_t* digests) {
  uint8_t* const piece = static_cast<uint8_t*>(aligned_alloc(kStripe, kPiece));
  if (piece == nullptr) return -ENOMEM;
  int64_t failure = 0;
  for (int64_t i = 0; i < num_objects && failure == 0; ++i) {
    counts[i] = read_object(file, positions[i], sizes[i], piece, targets[i], digests + i * xxh3::kDigestBytes);
    failure = std::min<int64_t>(0, counts[i]);
  }
  free(piece);
  _mm_sfence();
  return failure;
}

// Copies each source into a block, in pieces that begin `stride` bytes one after the other. Pieces are whole stripes,
// aligned to 32 bytes.
extern "C" void radixkv_fill(int64_t num_blocks, const uint8_t* const* sources, uint8_t* const* blocks, int64_t num_pieces,
                             int64_t piece_bytes, int64_t stride) {
  for (int64_t i = 0; i < num_blocks; ++i)
    for (int64_t piece = 0; piece < num_pieces; ++piece) {
      const uint8_t* from = sources[i] + piece * piece_bytes;
      uint8_t* to = blocks[i] + piece * stride;
      for (int64_t at = 0; at < piece_bytes; at += kStripe) {
        ask_for(from + at);
        copy_stripe(from + at, to + at);
      }
    }
  _mm_sfence();
}
