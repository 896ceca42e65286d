/* A minimal relay: receives HTTP/1.1, calls Triton's ModelStreamInfer on one connection, sends events.
 *
 *     relay PORT UPSTREAM_PORT
 *
 * Measures the cost of the sockets alone, in one thread. It reads `max_tokens` and `seed` anywhere in a
 * body, and sends the body itself as the prompt. For each returned frame it sends the same event. It has
 * no JSON, template, tokenizer, text, limits, errors or logs. It cancels a request only by resetting the
 * stream, trusts its upstream, and ignores the upstream's flow-control window.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { DATA, HEADERS, RST_STREAM = 3, SETTINGS, PING = 6, WINDOW_UPDATE = 8 };
enum { END = 1, END_HEADERS = 4, MAX_FRAME = 16384, TABLE = 1 << 16, AT_ONCE = 1 << 16 };
#define CHUNK(size, text) size "\r\n" text "\r\n"
#define EVENT "data: {\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":" \
    "\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"demo\",\"choices\":[{\"index\":0," \
    "\"delta\":{\"content\":\"~\"},\"finish_reason\":null}]}\n\n"
static const char HEAD[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                           "transfer-encoding: chunked\r\n\r\n";
static const char LAST[] = CHUNK("e", "data: [DONE]\n\n") "0\r\n\r\n";
static const char PATH[] = "/inference.GRPCInferenceService/ModelStreamInfer";

struct buffer { char *at; size_t have, room; };
struct peer { int fd; uint32_t stream; int begun, dirty; struct buffer in, out; };
static struct peer up, *by_stream[TABLE], *dirty[TABLE];
static uint32_t next_stream = 1, dirty_count, consumed;
static char event[512];
static size_t event_size;

static void add(struct buffer *b, const void *data, size_t size) {
    if (b->have + size + 1 > b->room)
        b->at = realloc(b->at, b->room = 2 * (b->have + size + 1));
    memcpy(b->at + b->have, data, size);
    b->at[b->have += size] = 0;
}
static void drop(struct buffer *b, size_t size) { memmove(b->at, b->at + size, b->have -= size); }
static void flush(struct peer *p) {
    ssize_t sent = p->out.have ? write(p->fd, p->out.at, p->out.have) : 0;
    if (sent > 0) drop(&p->out, sent);
}
static void frame(int kind, int flags, uint32_t stream, const void *data, uint32_t size) {
    unsigned char head[9] = {size >> 16, size >> 8, size, kind, flags};
    stream = htonl(stream);
    memcpy(head + 5, &stream, 4);
    add(&up.out, head, 9);
    add(&up.out, data, size);
}
static void number(int kind, uint32_t stream, uint32_t value) {
    value = htonl(value);
    frame(kind, 0, stream, &value, 4);
}
/* Append a protobuf field with bytes. */
static void field(struct buffer *b, int key, const void *data, size_t size) {
    char tag = key << 3 | 2;
    add(b, &tag, 1);
    for (size_t left = size;; left >>= 7) {
        char byte = (left & 127) | (left > 127 ? 128 : 0);
        add(b, &byte, 1);
        if (left < 128) break;
    }
    add(b, data, size);
}
static void tensor(struct buffer *b, const char *name) {
    char named[64] = {1 << 3 | 2, strlen(name)};
    strcpy(named + 2, name);
    field(b, 5, named, strlen(named));
}
static void header(struct buffer *b, const char *name, const char *value) {
    char sizes[2] = {0, strlen(name)}, size = strlen(value);
    add(b, sizes, 2), add(b, name, strlen(name)), add(b, &size, 1), add(b, value, size);
}
static int64_t after(const char *body, const char *name) {
    const char *at = strstr(body, name);
    return at ? atoll(at + strlen(name)) : 0;
}
static void ask(struct peer *client, const char *body, size_t size) {
    static struct buffer head, message;
    int32_t tokens = after(body, "\"max_tokens\":");
    int64_t seed = after(body, "\"seed\":");
    char id[32];
    if (!head.have) {
        add(&head, "\x83\x86", 2); /* :method POST, :scheme http */
        header(&head, ":path", PATH), header(&head, ":authority", "relay");
        header(&head, "content-type", "application/grpc"), header(&head, "te", "trailers");
    }
    client->stream = next_stream, client->begun = 0, next_stream += 2;
    by_stream[client->stream / 2 % TABLE] = client;
    frame(HEADERS, END_HEADERS, client->stream, head.at, head.have);
    message.have = 0;
    add(&message, "\0\0\0\0\0", 5);
    field(&message, 1, "tensorrt_llm", 12);
    field(&message, 3, id, snprintf(id, sizeof id, "relay-%u", client->stream));
    tensor(&message, "input_ids"), tensor(&message, "request_output_len"), tensor(&message, "random_seed");
    field(&message, 7, body, size), field(&message, 7, &tokens, 4), field(&message, 7, &seed, 8);
    uint32_t length = htonl(message.have - 5);
    memcpy(message.at + 1, &length, 4);
    for (size_t at = 0; at < message.have; at += MAX_FRAME) {
        size_t left = message.have - at;
        frame(DATA, left <= MAX_FRAME ? END : 0, client->stream, message.at + at,
              left < MAX_FRAME ? left : MAX_FRAME);
    }
}
static void took(struct peer *client) {
    char *end = client->in.have ? strstr(client->in.at, "\r\n\r\n") : NULL;
    char *told = end ? strcasestr(client->in.at, "content-length:") : NULL;
    size_t size = told && told < end ? strtoul(told + 15, NULL, 10) : 0;
    if (!end || client->in.have < (size_t)(end + 4 - client->in.at) + size) return;
    ask(client, end + 4, size);
    client->in.have = 0;
}
static void answer(int kind, int flags, uint32_t stream, const char *data, uint32_t size) {
    struct peer *client = by_stream[stream / 2 % TABLE];
    if (kind == DATA && (consumed += size) > 1 << 24) number(WINDOW_UPDATE, 0, consumed), consumed = 0;
    if (kind == SETTINGS && !(flags & END)) frame(SETTINGS, END, 0, "", 0);
    if (kind == PING && !(flags & END)) frame(PING, END, 0, data, size);
    if ((kind != DATA && kind != HEADERS) || !client || client->stream != stream) return;
    if (kind == DATA) {
        if (!client->begun++) add(&client->out, HEAD, sizeof HEAD - 1);
        add(&client->out, event, event_size);
    }
    if (flags & END) {
        add(&client->out, LAST, sizeof LAST - 1);
        client->stream = 0, by_stream[stream / 2 % TABLE] = NULL;
    }
    if (!client->dirty++) dirty[dirty_count++] = client;
}
static int fill(struct peer *p) { /* 0: no more data now; -1: the peer has closed */
    static char data[AT_ONCE];
    ssize_t got = read(p->fd, data, sizeof data);
    if (got > 0) add(&p->in, data, got);
    return got > 0 ? 1 : got == 0 ? -1 : 0;
}
static void from_upstream(void) {
    for (int more; (more = fill(&up));) {
        size_t at = 0;
        if (more < 0) exit(1);
        while (up.in.have - at >= 9) {
            unsigned char *head = (unsigned char *)up.in.at + at;
            uint32_t size = head[0] << 16 | head[1] << 8 | head[2], stream;
            if (up.in.have - at < 9 + size) break;
            memcpy(&stream, head + 5, 4);
            answer(head[3], head[4], ntohl(stream), up.in.at + at + 9, size);
            at += 9 + size;
        }
        drop(&up.in, at);
        while (dirty_count) dirty[--dirty_count]->dirty = 0, flush(dirty[dirty_count]);
    }
}
static void from_client(struct peer *client) {
    int more;
    while ((more = fill(client)) > 0) took(client);
    flush(client);
    if (more == 0) return;
    if (client->stream) number(RST_STREAM, client->stream, 8), by_stream[client->stream / 2 % TABLE] = NULL;
    close(client->fd);
    free(client->in.at), free(client->out.at), free(client);
}
static struct peer *watch(int epoll, struct peer *p, int fd) {
    int on = 1;
    struct epoll_event how = {EPOLLIN | EPOLLOUT | EPOLLET, {.ptr = p}};
    p->fd = fd;
    fcntl(fd, F_SETFL, O_NONBLOCK);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &how);
    return p;
}
int main(int count, char **told) {
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int listener = socket(AF_INET, SOCK_STREAM, 0), line = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    int epoll = epoll_create1(0), fd;
    struct peer front = {0};
    unsigned char window[6] = {0, 4, 127, 255, 255, 255};
    if (count != 3) return 2;
    signal(SIGPIPE, SIG_IGN);
    event_size = snprintf(event, sizeof event, "%zx\r\n%s\r\n", sizeof EVENT - 1, EVENT);
    here.sin_port = htons(atoi(told[2]));
    if (connect(line, (struct sockaddr *)&here, sizeof here)) return perror("upstream"), 1;
    watch(epoll, &up, line);
    add(&up.out, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 24);
    frame(SETTINGS, 0, 0, window, 6);
    number(WINDOW_UPDATE, 0, INT32_MAX - 65535);
    flush(&up);
    here.sin_port = htons(atoi(told[1]));
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&here, sizeof here) || listen(listener, 1024)) return perror("listen"), 1;
    watch(epoll, &front, listener);
    for (struct epoll_event found[256];;) {
        for (int left = epoll_wait(epoll, found, 256, -1); left-- > 0;) {
            struct peer *p = found[left].data.ptr;
            if (p == &up) from_upstream();
            else if (p != &front) from_client(p);
            else while ((fd = accept(listener, NULL, NULL)) >= 0) watch(epoll, calloc(1, sizeof *p), fd);
        }
        flush(&up);
    }
}
