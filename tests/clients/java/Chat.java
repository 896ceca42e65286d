import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.List;

/** Asks as LangChain4j and Spring AI do: by the client of the JDK with its defaults, which offers h2c. */
class Chat {
    static final HttpClient CLIENT = HttpClient.newHttpClient();

    static HttpRequest chat(String stream) {
        var body = """
            {"model": "demo", "temperature": 0, "max_tokens": 12, "stream": %s,
             "messages": [{"role": "user", "content": "Count from 1 to 60"}]}""".formatted(stream);
        return HttpRequest.newBuilder(URI.create(System.getenv("GATEWAY_BASE_URL") + "/chat/completions"))
            .header("content-type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body))
            .build();
    }

    static void check(boolean right, Object seen) {
        if (!right) throw new AssertionError(seen);
    }

    public static void main(String[] arguments) throws Exception {
        for (int turn = 0; turn < 2; turn++) {
            var whole = CLIENT.send(chat("false"), BodyHandlers.ofString());
            check(whole.statusCode() == 200 && whole.body().contains("1, 2, 3"), whole.body());
            var streamed = CLIENT.send(chat("true"), BodyHandlers.ofLines());
            List<String> lines = streamed.body().filter(line -> !line.isEmpty()).toList();
            check(streamed.statusCode() == 200 && lines.size() > 3, lines);
            check(lines.get(lines.size() - 1).equals("data: [DONE]"), lines);
        }
    }
}
