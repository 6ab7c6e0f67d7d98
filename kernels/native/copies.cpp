// Copies with non-temporal stores, since most of what they write would be evicted from the caches before anybody reads
// it: of blocks into their pool, and of objects, whose checksum is taken in the same pass. Objects go to files through
// the caches. `kernels/native/copies.py` calls them.

#include <immintrin.h>
#include <sys/uio.h>
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
// The same where nothing is stored meanwhile.
constexpr int64_t kFurtherAhead = 4096;
// A file is read in pieces that stay in the second-level cache.
constexpr int64_t kPiece = 128 << 10;
// A file is written in pieces that stay in the third-level cache, in whole pages: of a page that is written in part the
// rest would first be read. Each piece costs a call.
constexpr int64_t kWrittenPiece = 1 << 20, kPage = 4096;

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

void ask_for(const uint8_t* bytes, int64_t ahead = kAhead) {
  _mm_prefetch(reinterpret_cast<const char*>(bytes) + ahead, _MM_HINT_T0);
}

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

// Writes all of some parts, which are changed. Returns 0, or -errno.
int64_t write_all(int file, iovec* parts, int num_parts, int64_t position) {
  while (num_parts > 0) {
    ssize_t count = pwritev(file, parts, num_parts, position);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return count < 0 ? -errno : -EIO;
    position += count;
    for (; num_parts > 0 && count >= static_cast<ssize_t>(parts->iov_len); ++parts, --num_parts) count -= parts->iov_len;
    if (num_parts > 0) *parts = {static_cast<uint8_t*>(parts->iov_base) + count, parts->iov_len - count};
  }
  return 0;
}

// Writes an object, its checksum behind it, and zeros up to the end of the page. Returns as `write_all`.
int64_t write_object(int file, int64_t position, const uint8_t* head, int64_t head_bytes, const uint8_t* body,
                     int64_t body_bytes) {
  Checksum checksum;
  const int64_t num_bytes = head_bytes + body_bytes, before_end = bytes_before_end(num_bytes);
  uint8_t end[xxh3::kDigestBytes + kPage] = {};
  for (int64_t at = 0; at < num_bytes;) {
    const bool is_last = num_bytes - at < 2 * kWrittenPiece;
    const int64_t upto = is_last ? num_bytes : at + kWrittenPiece, checked = std::min(upto, before_end);
    const int64_t head_upto = std::clamp(head_bytes, at, upto), body_at = head_upto - head_bytes;
    for (int64_t i = at; i < std::min(head_upto, checked); i += kStripe)
      checksum.add_stripe(load(head + i), load(head + i + 32));
    for (int64_t i = body_at; i < checked - head_bytes; i += kStripe) {
      ask_for(body + i, kFurtherAhead);
      checksum.add_stripe(load(body + i), load(body + i + 32));
    }
    iovec parts[] = {{const_cast<uint8_t*>(head) + at, static_cast<size_t>(head_upto - at)},
                     {const_cast<uint8_t*>(body) + body_at, static_cast<size_t>(upto - head_upto)},
                     {end, 0}};
    if (is_last) {
      uint8_t last[kStripe];  // it may begin in the head
      for (int64_t i = 0; i < kStripe; ++i) {
        const int64_t from = num_bytes - kStripe + i;
        last[i] = from < head_bytes ? head[from] : body[from - head_bytes];
      }
      checksum.finish(last, num_bytes, end);
      parts[2].iov_len = xxh3::kDigestBytes + (kPage - (num_bytes + xxh3::kDigestBytes) % kPage) % kPage;
    }
    if (const int64_t failure = write_all(file, parts, 3, position + at)) return failure;
    at = upto;
  }
  return 0;
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

// Writes objects to a file: heads of whole stripes, bodies behind them, checksums of both and zeros up to the end of the
// page. A head and its body together have more than 240 bytes. Returns 0, or -errno of what failed.
extern "C" int64_t radixkv_write_checked(int file, int64_t num_objects, const int64_t* positions,
                                         const uint8_t* const* heads, const int64_t* head_bytes,
                                         const uint8_t* const* bodies, const int64_t* body_bytes) {
  for (int64_t i = 0; i < num_objects; ++i)
    if (const int64_t failure = write_object(file, positions[i], heads[i], head_bytes[i], bodies[i], body_bytes[i]))
      return failure;
  return 0;
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
