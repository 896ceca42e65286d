import com.fasterxml.jackson.annotation.JsonClassDescription;
import com.openai.client.OpenAIClient;
import com.openai.client.okhttp.OpenAIOkHttpClient;
import com.openai.core.http.StreamResponse;
import com.openai.helpers.ChatCompletionAccumulator;
import com.openai.models.chat.completions.ChatCompletion;
import com.openai.models.chat.completions.ChatCompletionChunk;
import com.openai.models.chat.completions.ChatCompletionCreateParams;
import com.openai.models.chat.completions.ChatCompletionToolMessageParam;
import com.openai.models.responses.ResponseCreateParams;
import com.openai.models.responses.ResponseInputItem;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;

/** A loop of one tool with openai-java, over chat completions, streaming and not, and Responses. */
class OpenAi {
    @JsonClassDescription("Reads a note.")
    static class ReadNote {
        public String name;

        String run() {
            try {
                return Files.readString(Path.of(name));
            } catch (IOException error) {
                return error.toString();
            }
        }
    }

    static class Sum {
        public int total;
    }

    static ChatCompletion complete(OpenAIClient client, ChatCompletionCreateParams params, boolean streaming) {
        if (!streaming) return client.chat().completions().create(params);
        var whole = ChatCompletionAccumulator.create();
        try (StreamResponse<ChatCompletionChunk> chunks = client.chat().completions().createStreaming(params)) {
            chunks.stream().forEach(whole::accumulate);
        }
        return whole.chatCompletion();
    }

    static String chat(OpenAIClient client, String model, boolean streaming) {
        var params = ChatCompletionCreateParams.builder()
            .model(model).addUserMessage("Read the note.").addTool(ReadNote.class);
        while (true) {
            var message = complete(client, params.build(), streaming).choices().get(0).message();
            var calls = message.toolCalls().orElse(List.of());
            if (calls.isEmpty()) return message.content().orElseThrow().strip();
            params.addMessage(message);
            for (var call : calls) {
                var function = call.asFunction();
                params.addMessage(ChatCompletionToolMessageParam.builder()
                    .toolCallId(function.id())
                    .contentAsJson(function.function().arguments(ReadNote.class).run())
                    .build());
            }
        }
    }

    static String respond(OpenAIClient client, String model) {
        List<ResponseInputItem> items = new ArrayList<>();
        items.add(ResponseInputItem.ofMessage(ResponseInputItem.Message.builder()
            .role(ResponseInputItem.Message.Role.USER).addInputTextContent("Read the note.").build()));
        while (true) {
            var params = ResponseCreateParams.builder()
                .model(model).store(false).addTool(ReadNote.class).inputOfResponse(items).build();
            var text = new StringBuilder();
            var called = false;
            for (var item : client.responses().create(params).output()) {
                if (item.isReasoning()) items.add(ResponseInputItem.ofReasoning(item.asReasoning()));
                if (item.isMessage()) {
                    item.asMessage().content().forEach(part -> text.append(part.asOutputText().text()));
                }
                if (item.isFunctionCall()) {
                    var call = item.asFunctionCall();
                    called = true;
                    items.add(ResponseInputItem.ofFunctionCall(call));
                    items.add(ResponseInputItem.ofFunctionCallOutput(ResponseInputItem.FunctionCallOutput.builder()
                        .callId(call.callId()).outputAsJson(call.arguments(ReadNote.class).run()).build()));
                }
            }
            if (!called) return text.toString().strip();
        }
    }

    public static void main(String[] arguments) {
        var model = arguments[1];
        var client = OpenAIOkHttpClient.builder()
            .baseUrl(arguments[0] + "/v1").apiKey("none").maxRetries(0).build();
        System.out.println(chat(client, model, false));
        System.out.println(chat(client, model, true));
        System.out.println(respond(client, model));
        var params = ChatCompletionCreateParams.builder()
            .model(model).addUserMessage("What is the sum?").responseFormat(Sum.class).build();
        client.chat().completions().create(params).choices().stream()
            .flatMap(choice -> choice.message().content().stream())
            .forEach(sum -> System.out.println("sum " + sum.total));
        client.close();
    }
}
