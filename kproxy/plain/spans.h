/* Keep, sort, join and write the assigned offsets of a partition, as spans and as intervals, without Python. */
#ifndef KPROXY_SPANS_H
#define KPROXY_SPANS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Offsets from `start` to before `end`. */
typedef struct {
    int64_t start, end;
} kp_interval;

/* Spans, in the order in which they came, as `size` bytes of `room`. Of each, the varints of its distance from the end of
 * the one before (the first's: from 0), in zigzag, and of its number of records: mostly two bytes together. `end` is the
 * last one's end, `last` the place of its number of records. */
typedef struct {
    uint8_t *bytes;
    int64_t end;
    uint32_t size, room, count, last;
} kp_spans;

/* The most bytes of a span. */
#define KP_SPAN_BYTES 20

static inline uint8_t *kp_put_varint(uint8_t *to, uint64_t value) {
    while (value >= 0x80) {
        *to++ = (uint8_t)(value | 0x80);
        value >>= 7;
    }
    *to++ = (uint8_t)value;
    return to;
}

static inline const uint8_t *kp_varint(const uint8_t *from, uint64_t *value) {
    uint64_t byte = *from++, result = byte & 0x7F;
    for (unsigned shift = 7; byte >= 0x80; shift += 7) {
        byte = *from++;
        result |= (byte & 0x7F) << shift;
    }
    *value = result;
    return from;
}

/* Write one more span. There must be room for KP_SPAN_BYTES. */
static inline void kp_put_span(kp_spans *spans, int64_t first, int64_t records) {
    uint64_t distance = (uint64_t)first - (uint64_t)spans->end;
    uint8_t *to = kp_put_varint(spans->bytes + spans->size, distance << 1 ^ (0 - (distance >> 63)));
    spans->last = (uint32_t)(to - spans->bytes);
    spans->size = (uint32_t)(kp_put_varint(to, (uint64_t)records) - spans->bytes);
    spans->end = (int64_t)((uint64_t)first + (uint64_t)records);
    spans->count++;
}

/* Read a span at `from` into `span`, which is the one before, or empty at 0. Return where the next one is. */
static inline const uint8_t *kp_next_span(const uint8_t *from, kp_interval *span) {
    uint64_t distance, records;
    from = kp_varint(kp_varint(from, &distance), &records);
    distance = distance >> 1 ^ (0 - (distance & 1));
    span->start = (int64_t)((uint64_t)span->end + distance);
    span->end = (int64_t)((uint64_t)span->start + records);
    return from;
}

/* Write others behind, joined where they begin at the end. There must be room for KP_SPAN_BYTES more than theirs. */
static inline void kp_add_spans(kp_spans *spans, const kp_spans *more) {
    kp_interval first = {0, 0};
    uint64_t records;
    if (!more->count) return;
    uint32_t read = (uint32_t)(kp_next_span(more->bytes, &first) - more->bytes), left = more->size - read;
    if (spans->count && first.start == spans->end) {
        kp_varint(spans->bytes + spans->last, &records);
        records += (uint64_t)first.end - (uint64_t)first.start;
        spans->size = (uint32_t)(kp_put_varint(spans->bytes + spans->last, records) - spans->bytes);
    } else {
        kp_put_span(spans, first.start, (int64_t)((uint64_t)first.end - (uint64_t)first.start));
    }
    spans->end = more->end;
    if (!left) return;
    memcpy(spans->bytes + spans->size, more->bytes + read, left);
    spans->last = spans->size + more->last - read;
    spans->size += left;
    spans->count += more->count - 1;
}

/* Sort by start. Each connection's intervals come in order, so there are few sorted runs: they are merged two by two.
 * `spare` has room for `count` as well. Return the array with the sorted intervals, `all` or `spare`. */
static inline kp_interval *kp_sort_intervals(kp_interval *all, kp_interval *spare, size_t count) {
    for (;;) {
        size_t from = 0, runs = 0, to = 0;
        while (from < count) {
            size_t middle = from + 1, end;
            while (middle < count && all[middle - 1].start <= all[middle].start) middle++;
            if (middle == count && !runs) return all;
            runs++;
            for (end = middle < count ? middle + 1 : middle; end < count && all[end - 1].start <= all[end].start;) end++;
            size_t left = from, right = middle;
            while (left < middle && right < end)
                spare[to++] = all[right].start < all[left].start ? all[right++] : all[left++];
            memcpy(spare + to, all + left, (middle - left) * sizeof *all);
            to += middle - left;
            memcpy(spare + to, all + right, (end - right) * sizeof *all);
            to += end - right;
            from = end;
        }
        kp_interval *sorted = spare;
        spare = all;
        all = sorted;
        if (runs <= 1) return all;
    }
}

/* Join sorted intervals where one begins at the other's end. Return how many are left, 0 if two have an offset in
 * common. */
static inline size_t kp_join_intervals(kp_interval *all, size_t count) {
    size_t last = 0;
    for (size_t at = 1; at < count; at++) {
        if (all[at].start < all[last].end) return 0;
        if (all[at].start == all[last].end)
            all[last].end = all[at].end;
        else
            all[++last] = all[at];
    }
    return count ? last + 1 : 0;
}

/* The longest number in decimal digits: 19 of them, a sign and a comma. */
#define KP_NUMBER_BYTES 21

/* Write a number in decimal digits. Return the end of the written text; there must be room for KP_NUMBER_BYTES. */
static inline char *kp_put_decimal(char *to, int64_t number) {
    static const char pairs[] =
        "00010203040506070809101112131415161718192021222324252627282930313233343536373839404142434445464748495051525354555657"
        "585960616263646566676869707172737475767778798081828384858687888990919293949596979899";
    char digits[2 * KP_NUMBER_BYTES], *first = digits + KP_NUMBER_BYTES;
    if (0 <= number && number < 10) {
        *to = (char)('0' + number);
        return to + 1;
    }
    uint64_t left = number < 0 ? 0 - (uint64_t)number : (uint64_t)number;
    for (; left >= 100; left /= 100) memcpy(first -= 2, pairs + 2 * (left % 100), 2);
    if (left >= 10) memcpy(first -= 2, pairs + 2 * left, 2);
    else *--first = (char)('0' + left);
    if (number < 0) *--first = '-';
    /* The length is constant, so that the copy is no call. */
    memcpy(to, first, KP_NUMBER_BYTES);
    return to + (digits + KP_NUMBER_BYTES - first);
}

/* A number in decimal digits that is written again and again while it goes up by small steps: `low` are its last eight
 * digits, `digits` the same with one in each byte, and `high` the text of those before them. */
typedef struct {
    uint64_t digits;
    uint32_t low, high_bytes;
    char high[KP_NUMBER_BYTES];
} kp_decimal;

#define KP_TEN_TO_8 100000000u
/* In each byte. */
#define KP_EACH(byte) (0x0101010101010101u * (uint64_t)(byte))

static inline void kp_set_decimal(kp_decimal *decimal, uint64_t number) {
    uint32_t left = decimal->low = (uint32_t)(number % KP_TEN_TO_8);
    decimal->digits = 0;
    for (unsigned at = 0; at < 64; at += 8, left /= 10) decimal->digits |= (uint64_t)(left % 10) << at;
    decimal->high_bytes = 0;
    if (number >= KP_TEN_TO_8)
        decimal->high_bytes = (uint32_t)(kp_put_decimal(decimal->high, (int64_t)(number / KP_TEN_TO_8)) - decimal->high);
}

/* Add less than 10,000; return 0, and change nothing, if more than the last eight digits change. */
static inline int kp_step_decimal(kp_decimal *decimal, uint32_t step) {
    uint32_t hundreds = step / 100, rest = step % 100;
    uint64_t more = (uint64_t)(hundreds / 10) << 24 | hundreds % 10 << 16 | rest / 10 << 8 | rest % 10, sum;
    if (decimal->low + step >= KP_TEN_TO_8) return 0;
    decimal->low += step;
    /* 246 more in each byte, so that one with 10 or more carries; where none did, they are taken off again. */
    sum = decimal->digits + KP_EACH(246) + more;
    decimal->digits = sum - (sum >> 4 & KP_EACH(1)) * 246;
    return 1;
}

/* Like kp_put_decimal. */
static inline char *kp_put_digits(char *to, const kp_decimal *decimal) {
    uint64_t digits = decimal->digits;
    unsigned count = 8;
    if (decimal->high_bytes) {
        memcpy(to, decimal->high, KP_NUMBER_BYTES);
        to += decimal->high_bytes;
    } else {
        for (; count > 1 && !(digits >> 56); count--) digits <<= 8;
    }
    digits += KP_EACH('0');
#if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    digits = __builtin_bswap64(digits);
    memcpy(to, &digits, sizeof digits);
#else
    for (unsigned at = 0; at < 8; at++) to[at] = (char)(digits >> (56 - 8 * at));
#endif
    return to + count;
}

/* Write the first offset and the number of records of each span, separated by commas. Return the end of the text; there
 * must be room for 2 * KP_NUMBER_BYTES for each span, and for KP_NUMBER_BYTES more. */
static inline char *kp_put_json(char *to, const kp_spans *spans) {
    const uint8_t *at = spans->bytes;
    kp_interval span = {0, 0};
    kp_decimal decimal;
    int64_t shown = -1;
    for (uint32_t number = 0; number < spans->count; number++) {
        at = kp_next_span(at, &span);
        if (number) *to++ = ',';
        uint64_t step = (uint64_t)span.start - (uint64_t)shown;
        if (span.start < 0) {
            to = kp_put_decimal(to, span.start);
        } else {
            if (shown < 0 || step >= 10000 || !kp_step_decimal(&decimal, (uint32_t)step))
                kp_set_decimal(&decimal, (uint64_t)span.start);
            to = kp_put_digits(to, &decimal);
        }
        shown = span.start;
        *to++ = ',';
        to = kp_put_decimal(to, (int64_t)((uint64_t)span.end - (uint64_t)span.start));
    }
    return to;
}

#endif
