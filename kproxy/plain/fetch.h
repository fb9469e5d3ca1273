/* Read fetch requests and their answers, versions 4 to 18, without Python.
 *
 * `kp_reads_again` compares a request with a known one, and `kp_read_again` makes the known one ask for the same offsets;
 * `kp_has_read` checks an answer. They are conservative: a frame with anything unusual is left to the Python codec
 * (kproxy_codec.fetch), which has the layouts. No pointer is followed beyond the lengths given.
 */
#ifndef KPROXY_PLAIN_FETCH_H
#define KPROXY_PLAIN_FETCH_H

#include "wire.h"

typedef struct {
    uint32_t head_start, head_end;  /* the encoded name or id, in the known request */
    uint32_t count;                 /* its entries */
} kp_read_topic;

/* A known request, as it is sent to brokers: without a session and leader epochs. `starts` are its entries. */
typedef struct {
    uint8_t *frame;
    uint32_t size, topics_start, topic_count, entry_count;
    int version;
    kp_read_topic *topics;
    uint32_t *starts;
} kp_read;

/* An entry begins with its index, from version 9 on the leader epoch, and the offset. */
static inline uint32_t kp_offset_in_entry(int version) { return version >= 9 ? 8 : 4; }

/* Whether a request has the same size, header, limits and partitions as the known one, and continues no session. */
static inline int kp_reads_again(const uint8_t *frame, uint32_t size, const kp_read *known) {
    uint32_t from = KP_CORRELATION_ID_OFFSET + 4, offset = kp_offset_in_entry(known->version);
    if (size != known->size || memcmp(frame, known->frame, KP_CORRELATION_ID_OFFSET) != 0) return 0;
    if (known->version >= 7) {
        int32_t epoch = kp_int32(frame + known->topics_start - 4);
        if (epoch != 0 && epoch != -1) return 0;
        if (memcmp(frame + from, known->frame + from, known->topics_start - 8 - from) != 0) return 0;
        from = known->topics_start;
    }
    for (uint32_t at = 0; at < known->entry_count; at++) {
        uint32_t end = known->starts[at] + 4;
        if (memcmp(frame + from, known->frame + from, end - from) != 0) return 0;
        from = known->starts[at] + offset + 8;
    }
    return memcmp(frame + from, known->frame + from, size - from) == 0;
}

/* Write the known request for the offsets of `frame`, which reads again. */
static inline void kp_read_again(const uint8_t *frame, const kp_read *known, uint8_t *place) {
    uint32_t offset = kp_offset_in_entry(known->version);
    memcpy(place, known->frame, known->size);
    for (uint32_t at = 0; at < known->entry_count; at++)
        memcpy(place + known->starts[at] + offset, frame + known->starts[at] + offset, 8);
}

/* Whether an answer has a result without an error for each entry of the known request, in its order, and nothing that
 * clients must not see. Its session and preferred replicas are blanked, as kproxy_codec.fetch does. */
static inline int kp_has_read(uint8_t *answer, uint32_t size, const kp_read *known) {
    int version = known->version, flexible = version >= 12;
    uint32_t at = 8, entry = 0, count, length, fixed = 6 + 16 + (version >= 5 ? 8 : 0);
    uint8_t text[8], *text_end;
    if (size < 8 || (flexible && (size == at || answer[at++] != 0)) || size - at < 10) return 0;
    at += 4;
    if (version >= 7) {
        if (kp_int16(answer + at) != 0) return 0;
        kp_put_int32(answer + at + 2, 0);
        at += 6;
    }
    text_end = kp_put_count(text, known->topic_count, flexible);
    if ((size_t)(text_end - text) > size - at || memcmp(answer + at, text, (size_t)(text_end - text)) != 0) return 0;
    at += (uint32_t)(text_end - text);
    for (uint32_t place = 0; place < known->topic_count; place++) {
        const kp_read_topic *topic = known->topics + place;
        uint32_t head_bytes = topic->head_end - topic->head_start;
        text_end = kp_put_count(text, topic->count, flexible);
        if (head_bytes + (uint32_t)(text_end - text) > size - at) return 0;
        if (memcmp(answer + at, known->frame + topic->head_start, head_bytes) != 0) return 0;
        at += head_bytes;
        if (memcmp(answer + at, text, (size_t)(text_end - text)) != 0) return 0;
        at += (uint32_t)(text_end - text);
        for (uint32_t end = entry + topic->count; entry < end; entry++) {
            if (size - at < fixed) return 0;
            if (memcmp(answer + at, known->frame + known->starts[entry], 4) != 0) return 0;
            if (kp_int16(answer + at + 4) != 0) return 0;
            at += fixed;
            /* The aborted transactions, null or not: 16 bytes each. */
            if (flexible) {
                if (!kp_uvarint(answer, size, &at, &count)) return 0;
                count = count ? count - 1 : 0;
            } else {
                if (size - at < 4 || kp_int32(answer + at) < -1) return 0;
                count = kp_int32(answer + at) == -1 ? 0 : (uint32_t)kp_int32(answer + at);
                at += 4;
            }
            if (count > (size - at) / (16 + (uint32_t)flexible)) return 0;
            for (; count; count--) {
                at += 16;
                if (flexible && answer[at++] != 0) return 0;
            }
            if (version >= 11) {
                if (size - at < 4) return 0;
                kp_put_int32(answer + at, -1);
                at += 4;
            }
            if (flexible) {
                if (!kp_uvarint(answer, size, &at, &length) || length == 0) return 0;
                length -= 1;
            } else {
                if (size - at < 4 || kp_int32(answer + at) < 0) return 0;
                length = (uint32_t)kp_int32(answer + at);
                at += 4;
            }
            if (length > size - at) return 0;
            at += length;
            if (flexible && (at == size || answer[at++] != 0)) return 0;
        }
        if (flexible && (at == size || answer[at++] != 0)) return 0;
    }
    if (flexible && (at == size || answer[at++] != 0)) return 0;
    return at == size;
}

#endif
